"""State of one console, and the data that all consoles of a launch share."""

import warp as wp

MOST_INSTRUCTIONS = 25000  # per frame, as in ALE
MOST_SPANS = 1000  # in the log of a frame; see `spans`
SPAN_WORDS = 6

Two, Three, Four = wp.vec2i, wp.vec3i, wp.vec4i
Five = wp.types.vector(length=5, dtype=wp.int32)

NAMES = {
    "size": ("size0", "size1"),
    "color": ("color0", "color1", "color_playfield", "color_background"),
    "mirror": ("mirror0", "mirror1"),
    "shape": ("shape0", "shape1"),
    "old_shape": ("old_shape0", "old_shape1"),
    "enabled": ("missile0", "missile1", "ball"),
    "delay": ("delay0", "delay1", "delay_ball"),
    "hide": ("hide0", "hide1"),
    "position": ("x0", "x1", "x_missile0", "x_missile1", "x_ball"),
    "skip": ("skip0", "skip1"),
    "trigger": ("trigger0", "trigger1"),
    "paddle": ("paddle0", "paddle1"),
    "move": ("move0", "move1", "move_missile0", "move_missile1", "move_ball"),
}
"""Names of the entries of each vector below. Only index them with constants, so that a GPU keeps them in registers."""


@wp.struct
class Console:
    """Registers of one console. Flags are 0 or 1; clocks and cycles count from the start of the frame.

    One cycle of the processor is three clocks of the video chip. A scan line has 228 clocks, of which the first 68 are
    blank.
    """

    # 6507, the processor
    a: int
    x: int
    y: int
    sp: int
    pc: int
    negative: int
    overflow: int
    break_flag: int
    decimal: int
    no_interrupts: int
    zero: int
    carry: int
    cycles: int  # since the frame began
    bus: int  # the last byte on the data bus
    address: int  # of the instruction's operand
    value: int  # that the instruction works on
    # TIA, the video chip
    frame_start: int  # clock at which the first line began, at most 0
    swept: int  # clock up to which `beam` has followed the beam, or has put it off
    vsync: int
    vblank: int
    size: Two  # NUSIZ0, NUSIZ1
    color: Four  # COLUP0, COLUP1, COLUPF, COLUBK
    control: int  # CTRLPF
    mirror_playfield: int  # bit 0 of CTRLPF, as the beam found it in the middle of the line
    mirror: Two  # REFP0, REFP1
    playfield: int  # 20 bits: 4 of PF0, 8 of PF1, 8 of PF2
    shape: Two  # GRP0, GRP1
    old_shape: Two  # shown instead while the player's `delay` is set
    enabled: Three  # ENAM0, ENAM1, ENABL
    old_ball: int  # shown instead of `enabled[2]` while the ball's `delay` is set
    delay: Three  # VDELP0, VDELP1, VDELBL
    hide: Two  # RESMP0, RESMP1
    collisions: int  # two bits for each of the registers CXM0P to CXPPMM, but one for CXBLPF
    position: Five  # of the players, the missiles and the ball, 0 to 159
    hmove_blank: int
    stars: int  # 1 if missile 0 moves in each line, like the stars of Cosmic Ark
    stars_line: int  # 0 to 3
    skip: Two  # 1 if the first copy of a player is not drawn until the line ends
    # cartridge: which kilobyte of the ROM each of the four windows shows, one byte for each
    pages: wp.uint32
    # the frame
    ended: int  # 1 once the frame has ended
    partial: int  # 1 if the last frame ran out of instructions before it ended
    n_instructions: int  # in this frame so far


@wp.struct
class Periphery:
    """Rarely used state, kept in memory because it does not all fit into a GPU's registers."""

    # RIOT: its RAM is in `Board.ram`
    timer: int
    timer_shift: int  # 0, 3, 6 or 10: log2 of the timer's interval
    timer_set: int  # cycle
    timer_expired: int  # cycle at which the timer was first read after it expired
    timer_was_read: int
    direction_a: int
    direction_b: int
    # controllers and switches
    controller: int
    blanks: int  # 1 if HMOVE blanks the left 8 pixels
    sticks: int  # SWCHA
    switches: int  # SWCHB
    trigger: Two  # 0x80 unless pressed
    paddle: Two  # ohms at INPT0 and INPT1; -1 for none
    paddle_least: int
    paddle_most: int
    input2: int  # INPT2 and INPT3
    # TIA
    move: Five  # HMP0, HMP1, HMM0, HMM1, HMBL, 0 to 15
    vsync_end: int  # clock from which switching VSYNC off ends the frame
    dump: int
    dump_end: int  # cycle
    hmove_clock: int
    unfollowed: int  # clock of the last write that changed nothing, for which the beam was not followed
    # the picture
    first_line: int
    n_lines: int
    scanline: int  # lines of the last frame, ended or not
    n_scanlines: int  # lines of the last frame that ended
    n_frames: int
    pal: int  # 1 for a European cartridge: longer frames, and grey ones after an odd number of lines


@wp.struct
class Board:
    """Arrays in memory, and constants shared by all consoles of a launch."""

    rom: wp.array(dtype=wp.uint8)
    program: wp.array(dtype=wp.uint64)  # the instruction at each byte of the ROM; see `opcodes.make_program`
    opcodes: wp.array(dtype=int)  # [256]
    outer: wp.array(dtype=Periphery)  # [B]
    ram: wp.array2d(dtype=wp.uint8)  # [B, 256]: 128 of the RIOT, 128 of the cartridge
    # Two pictures for each console, which frames draw in turn, four pixels in a number.
    screen: wp.array(dtype=wp.uint32)
    picture: int  # numbers in a picture: lines * 40
    mapper: int  # see `cartridge`
    draw: int  # 0: only find collisions
    # The beam is put off on a GPU, and if `puts_off` is 1; see `spans`.
    puts_off: int
    log: wp.array(dtype=wp.uint32)  # [B, MOST_SPANS + 1, SPAN_WORDS]
    n_spans: int  # in the log of this console
    n_followed: int  # of these, those whose collisions were found
    # the instruction, if it must wait for its collisions
    waits: int
    word: int
    opcode: int


Registers = wp.ref[Console]
"""Reference to the registers of one console, which functions change in place.

In an array of length one, every ``+=`` would be an atomic operation, and a GPU would keep the registers in memory. If
functions returned new registers, Warp would turn each ``if`` into selections: that kernel was 30 times slower on a CPU.

A local variable that an ``if`` changes is such a selection too, and occupies a register of a GPU throughout the loop.
Let the ``if`` change a field of a struct instead, or return from a function.
"""
Outer = wp.ref[Periphery]
Shared = wp.ref[Board]


@wp.func_native(snippet="\n#ifdef __CUDA_ARCH__\nreturn false;\n#else\nreturn true;\n#endif\n")
def on_a_cpu() -> bool:
    """Return True if a kernel is compiled for a CPU: a constant, so that the compiler removes the other branch."""


@wp.func_native(
    snippet="""
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(number));
#endif
    return number;
"""
)
def unknown(number: int) -> int:
    """Return a number of which the compiler for a GPU knows nothing, so that it makes no branches for its values."""


def noinline(function: wp.Function) -> wp.Function:
    """Copy a Warp function without inlining: CPU code exists once per frequent opcode, and shares what is large."""
    return wp.func(function.func, name=f"{function.key}_noinline", inline=False)


@wp.func
def puts_off(board: Shared) -> bool:
    """Return True if the beam is followed later; a constant on a GPU."""
    return not on_a_cpu() or board.puts_off != 0


@wp.func_native(snippet="return program.data[at];")
def instruction(program: wp.array(dtype=wp.uint64), at: int) -> wp.uint64:
    """Read an entry of `Board.program`. Unlike Warp's arrays, this and the functions below allow no negative index."""


@wp.func_native(snippet="return rom.data[at];")
def byte_of_rom(rom: wp.array(dtype=wp.uint8), at: int) -> int:
    """Read an entry of `Board.rom`."""


@wp.func_native(snippet="return ram.data[size_t(i) * ram.strides[0] + at * ram.strides[1]];")
def byte_of_ram(ram: wp.array2d(dtype=wp.uint8), i: int, at: int) -> int:
    """Read an entry of `Board.ram`."""


@wp.func_native(snippet="ram.data[size_t(i) * ram.strides[0] + at * ram.strides[1]] = wp::uint8(byte);")
def set_byte_of_ram(ram: wp.array2d(dtype=wp.uint8), i: int, at: int, byte: int):
    """Write an entry of `Board.ram`."""


@wp.func_native(snippet=f"return log.data[(size_t(i) * {MOST_SPANS + 1} + span) * {SPAN_WORDS} + word];")
def log_word(log: wp.array(dtype=wp.uint32), i: int, span: int, word: int) -> wp.uint32:
    """Read a word of `Board.log`."""


@wp.func_native(snippet=f"log.data[(size_t(i) * {MOST_SPANS + 1} + span) * {SPAN_WORDS} + word] = bits;")
def set_log_word(log: wp.array(dtype=wp.uint32), i: int, span: int, word: int, bits: wp.uint32):
    """Write a word of `Board.log`."""


@wp.func_native(snippet="return screen.data[size_t(which) * size + at];")
def pixels(screen: wp.array(dtype=wp.uint32), which: int, size: int, at: int) -> wp.uint32:
    """Read four pixels of picture `which` in `Board.screen`."""


@wp.func_native(snippet="screen.data[size_t(which) * size + at] = four;")
def set_pixels(screen: wp.array(dtype=wp.uint32), which: int, size: int, at: int, four: wp.uint32):
    """Write four pixels of picture `which` in `Board.screen`."""
