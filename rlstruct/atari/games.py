"""Settings of individual games, by ALE's names: controllers, and rules for reward, lives and the end.

The rules come from black-box tests of ale-py: ``tests/atari/find_rules.py`` changes single bytes of RAM in
ALE's states, and reads the reward, lives and end of game that ALE then reports.
"""

from rlstruct.atari.rules import Rules

JOYSTICK, RIGHT_JOYSTICK, PADDLE, SECOND_PADDLE = range(4)
CONTROLLERS = {
    **dict.fromkeys(("surround", "wizard_of_wor"), RIGHT_JOYSTICK),
    **dict.fromkeys(("backgammon", "blackjack", "breakout", "casino", "kaboom"), PADDLE),
    "pong": SECOND_PADDLE,
}
"""Controller of the player, for games that do not use the left joystick."""
NO_HMOVE_BLANKS = frozenset({"asteroids", "battle_zone", "darkchambers", "ms_pacman"})
"""Games whose left 8 pixels ALE shows even where HMOVE blanks them on a real console."""
TWO_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""Games that ale-py ships but cannot load for one player."""

RULES = {
    "air_raid": Rules(score="10000*d40 100*d41 d42", lives="1", over="39==255"),
    "alien": Rules(
        score="10*b11>>3 100*b9>>3 1000*b7>>3 10000*b5>>3 100000*b3>>3",
        lives="b64&15",
        over="64&15==0",
        special=((3, 128, 0), (5, 128, 0), (7, 128, 0), (9, 128, 0), (11, 128, 0)),
    ),
    "amidar": Rules(score="d89 100*d90 10000*d91", lives="b86&15", over="86==128"),
    "assault": Rules(score="10000*d0 100*d1 d2", lives="b101", over="101==0"),
    "asterix": Rules(score="10000*d94 100*d95 d96", lives="b83&15", over="71==1 83&15==1"),
    "asteroids": Rules(score="1000*d61 10*d62", lives="b60>>4&15", over="60<16", wraps=100000),
    "atlantis": Rules(score="1000000*d33 100*d34 10000*d35", lives="b113", over="113==255", still_at_end=True),
    "atlantis2": Rules(score="d33 100*d34 10000*d35", lives="b113", over="113==255", still_at_end=True),
    "bank_heist": Rules(score="10000*d88 100*d89 d90", lives="b85", over="78==1 85==0"),
    "basic_math": Rules(score="d4", lives="1", over="6!=0"),
    "battle_zone": Rules(score="1000*y29 10000*z30 100000*y30", lives="b58&15", over="58&15==0"),
    "beam_rider": Rules(score="d9 100*d10 10000*d11", lives="b5 1", drops="12==1", over="5==255"),
    "berzerk": Rules(score="10000*d93 100*d94 d95", lives="b90 1", over="90==255"),
    "bowling": Rules(score="d33 100*d38", over="36>16"),
    "boxing": Rules(
        score="d18 -d19",
        over="18==154 | 18==160 | 18==192 | 19==154 | 19==160 | 19==192 | 17==0 16<16",
        special=((18, 192, 100), (19, 192, -100)),
    ),
    "breakout": Rules(score="100*l76 d77", lives="b57", over="57==0"),
    "carnival": Rules(score="1000*d45 10*d46", over="3==0"),
    "centipede": Rules(score="10000*d116 100*d117 d118", lives="b109>>4&7 1", over="38&64==64"),
    "chopper_command": Rules(score="10000*d108 100*d110", lives="b100&15", over="100&15==0"),
    "crazy_climber": Rules(score="100*b2 1000*b3 10000*b4 100000*b5", lives="b42", over="42==0"),
    "defender": Rules(score="z28 10*z29 100*z30 1000*z31 10000*z32 100000*z33", lives="b66", over="66==0"),
    "demon_attack": Rules(
        score="10000*d1 100*d3 d5",
        lives="b114 1",
        over="113==189 114==0",
        special=((1, 171, 0), (3, 205, 0), (5, 234, 0)),
    ),
    "donkey_kong": Rules(score="10000*d7 100*d8", lives="b35", over="11==31 15==3 35==0"),
    "double_dunk": Rules(score="d118 -d119", over="118>35 126==231 | 119>35 126==231"),
    "enduro": Rules(score="-d43 -100*d44 300*b45", over="47==255", special=((45, 0, 300),)),
    "entombed": Rules(score="b99", lives="1", over="71&3==0"),
    "fishing_derby": Rules(score="d61 -d62", over="61==153 | 62==153"),
    "flag_capture": Rules(score="d106", lives="1", over="107==0"),
    "freeway": Rules(score="d103", over="22==1", most=1),
    "frogger": Rules(score="100*d76 d78", lives="b80", over="80==255"),
    "frostbite": Rules(score="10000*d72 100*d73 d74", lives="b76&15 1", over="76&15==0 113>127"),
    "galaxian": Rules(score="10000*d44 100*d45 d46", lives="b57 1", over="63>127", wraps=1000000),
    "gopher": Rules(score="10000*d48 100*d49 d50", lives="b52&1 b52>>1&1 b52>>2&1", over="52&7==0"),
    "gravitar": Rules(score="10000*d7 100*d8 d9", lives="b4 1", over="1==1"),
    "hero": Rules(score="10000*d55 100*d56 d57", lives="b51", over="51==0"),
    "human_cannonball": Rules(score="d54", lives="1", over="54==7 | 55==7"),
    "ice_hockey": Rules(score="d10 -d11", over="6==0 7==0", most=1),
    "jamesbond": Rules(score="d92 100*d93 10000*d94", lives="b6&15 1", over="6&15==0 12==104"),
    "journey_escape": Rules(score="10000*d16 100*d17 d18", over="21==0 22==0"),
    "kaboom": Rules(score="10000*d35 100*d36 d37", lives="1", over="33==0"),
    "kangaroo": Rules(score="10000*d39 100*d40", lives="b45&7 1", over="45==255"),
    "king_kong": Rules(score="100*d2 d3", lives="b110", over="110==0"),
    "koolaid": Rules(score="10000*d0 100*d1", over="81==128"),
    "krull": Rules(score="10000*d28 100*d29 d30", lives="b31&7 1", over="0==128 31==0 34==3"),
    "kung_fu_master": Rules(score="10000*d24 100*d25 d26", lives="b29&7 1", over="29==255"),
    "laser_gates": Rules(score="10000*d0 100*d1 d2", over="3==0"),
    "lost_luggage": Rules(score="10000*d20 100*d21 d22", lives="b74", over="37==0 41==0 72==10 74==0"),
    "mario_bros": Rules(score="10000*d9 100*d10", lives="b7", over="7==0"),
    "montezuma_revenge": Rules(score="10000*d19 100*d20 d21", lives="b58&7 1", over="58==0 126==96"),
    "mr_do": Rules(score="10*d2 1000*d3", lives="b91", over="90==64"),
    "ms_pacman": Rules(score="d120 100*d121 10000*d122", lives="b123&7 1", over="39==83 123&15==0"),
    "name_this_game": Rules(score="10000*d68 100*d69 d70", lives="b71&7", over="71&7==0"),
    "pacman": Rules(score="d76 100*d78 10000*d80", lives="b24 1", over="24==0 100==63"),
    "phoenix": Rules(score="10*h71 100*d72 10000*d73", lives="b75&7", over="76==128"),
    "pitfall": Rules(score="10000*d85 100*d86 d87", lives="1 b0>>7&1 b0>>5&1", over="30!=0 0<16"),
    "pong": Rules(score="-b13 b14", over="13==21 | 14==21"),
    "pooyan": Rules(score="10000*d8 100*d9 d10", lives="b22&7 1", over="22==0 24==5"),
    "private_eye": Rules(score="10000*d72 100*d73 d74", over="66>1"),
    "qbert": Rules(
        score="10000*d89 100*d90 d91",
        lives="4",
        over="8==254 | 8==2 128==255",
        still_at_end=True,
        before=8,
        counts_down=True,
    ),
    "riverraid": Rules(
        score="100000*e77 10000*e79 1000*e81 100*e83 10*e85 e87",
        lives="b64>>3 1",
        over="64==88 128==89",
        special_lives=((64, 88, 3), (64, 89, 0)),
        before=64,
    ),
    "road_runner": Rules(
        score="100*z73 1000*z74 10000*z75 100000*z76", lives="b68&7 1", over="68&7==0 57!=0 | 68&7==0 61!=0"
    ),
    "robotank": Rules(score="b53 12*b54", lives="b40&15 1", over="40==0 52==255"),
    "seaquest": Rules(score="10000*d56 100*d57 d58", lives="b59 1", over="35!=0"),
    "sir_lancelot": Rules(score="10000*d30 100*d31 d32", lives="b41", over="39==160 41==0"),
    "skiing": Rules(score="-6000*b104 -100*d105 -d106", over="17==255"),
    "solaris": Rules(score="10*d92 1000*d93 100000*d94", lives="b89&15", over="89==0"),
    "space_invaders": Rules(score="100*d102 d104", lives="b73", over="24>127 | 73==0", wraps=10000),
    "star_gunner": Rules(
        score="100*z3 1000*z4 10000*z5 100000*z6", lives="b7&15", over="7==0", special_lives=((7, 6, 5),)
    ),
    "surround": Rules(score="-d118 d119", lives="1", over="118==10 | 118==16 | 119==10 | 119==16"),
    "tennis": Rules(score="b69 -b70", sets="b71 -b72", over="71>6 | 72>6 | 71==6 72<5 | 72==6 71<5"),
    "tetris": Rules(score="d113 100*d114", over="115>127"),
    "time_pilot": Rules(score="100*d13 10000*d15", lives="b11&7 1", over="32!=0", held="0&15!=2"),
    "trondead": Rules(score="10000*d61 100*d62 d63", lives="-b72 5", over="72==5"),
    "turmoil": Rules(score="10*d9 1000*d10 10*b83", lives="b57", over="57==0 69==1"),
    "tutankham": Rules(score="100*d26 d28", lives="b30&3", over="30==0"),
    "up_n_down": Rules(score="10000*d0 100*d1 d2", lives="b6&15 1", over="6&15==0 20>64"),
    "venture": Rules(score="10000*d71 100*d72", lives="b70&7 1", over="70==0 77==255 63>127"),
    "video_pinball": Rules(score="d48 100*d50 10000*d52", lives="-b25&7 b40&1 4", over="47&1==1"),
    "wizard_of_wor": Rules(
        score="100*d6 10000*l8 100000*b8>>4&7", lives="b13&15", over="13&15==0 116==248", held="87&1==1"
    ),
    "yars_revenge": Rules(score="10000*d96 100*d97 d98", lives="b30>>4&15", over="30<16"),
    "zaxxon": Rules(score="10000*d104 100*d105", lives="b106&7", over="106&7==0"),
}
"""Scoring rules of the games that `Atari` plays."""
