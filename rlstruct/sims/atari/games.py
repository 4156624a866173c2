"""What is special about some cartridges, by ALE's names of the games."""

SECOND_PADDLE = frozenset({"pong"})
PADDLES = frozenset({"backgammon", "blackjack", "breakout", "casino", "kaboom"}) | SECOND_PADDLE
RIGHT_JOYSTICK = frozenset({"surround", "wizard_of_wor"})
NO_HMOVE_BLANKS = frozenset({"asteroids", "battle_zone", "darkchambers", "ms_pacman"})
"""ALE shows the left 8 pixels of these games although HMOVE blanks them on a console."""
TWO_PLAYERS = frozenset({"combat", "joust", "maze_craze", "warlords"})
"""ROMs that ale-py ships, but that its interface of one player does not load."""
