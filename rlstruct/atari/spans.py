"""When the beam is followed: before a write changes the picture; or later, from a log of spans.

Most writes to the TIA repeat the current value, so the beam need not catch up for them.

On a GPU the consoles of a warp write at different times. If each followed its beam at once, the others would wait. So a
console only logs what its beam will meet: spans of clocks in which no write changes the picture. All consoles of a warp
then look for collisions together, when one reads them, and a thread for each line draws the picture after the frame.
"""

import warp as wp

from rlstruct.atari.beam import pass_by, picture_end, sweep, sweep_line
from rlstruct.atari.state import (
    MOST_INSTRUCTIONS,
    MOST_SPANS,
    Console,
    Outer,
    Registers,
    Shared,
    log_word,
    noinline,
    on_a_cpu,
    puts_off,
    set_log_word,
)
from rlstruct.atari.tia import is_late, write_delay

CATCH_UP = 2
"""Value of `Console.ended` while the processor waits for the beam."""
CLOCKS = (1 << 18) - 1


@wp.func
def pack(byte0: int, byte1: int, byte2: int, byte3: int) -> wp.uint32:
    """Pack four bytes into a word."""
    return wp.uint32(byte0 | (byte1 << 8) | (byte2 << 16) | (byte3 << 24))


@wp.func
def byte(word: wp.uint32, k: int) -> int:
    """Return byte k of a word."""
    return int(word >> wp.uint32(8 * k)) & 0xFF


@wp.func
def bit(word: wp.uint32, k: int) -> int:
    """Return bit k of a word."""
    return int(word >> wp.uint32(k)) & 1


@wp.func
def write_span(board: Shared, i: int, m: Registers, k: int):
    """Write all that the beam meets from `m.swept` on as span k."""
    flags = m.mirror_playfield | (m.hmove_blank << 1) | (m.stars << 2) | (m.stars_line << 3)
    flags |= (m.mirror[0] << 5) | (m.mirror[1] << 6) | (m.skip[0] << 7) | (m.skip[1] << 8) | (m.hide[0] << 9)
    flags |= (m.hide[1] << 10) | (m.delay[0] << 11) | (m.delay[1] << 12) | (m.delay[2] << 13)
    enabled = m.enabled[0] | (m.enabled[1] << 1) | (m.enabled[2] << 2) | (m.old_ball << 3)
    set_log_word(board.log, i, k, 0, wp.uint32(((m.swept - m.frame_start) & CLOCKS) | (flags << 18)))
    set_log_word(board.log, i, k, 1, pack(m.color[0], m.color[1], m.color[2], m.color[3]))
    set_log_word(board.log, i, k, 2, pack(m.shape[0], m.shape[1], m.old_shape[0], m.old_shape[1]))
    set_log_word(board.log, i, k, 3, pack(m.position[0], m.position[1], m.position[2], m.position[3]))
    set_log_word(board.log, i, k, 4, pack(m.size[0], m.size[1], m.vblank, m.position[4]))
    set_log_word(board.log, i, k, 5, wp.uint32(m.playfield | (enabled << 20) | (m.control << 24)))


@wp.func
def span_begin(board: Shared, i: int, m: Registers, k: int) -> int:
    """Return the clock at which span k begins."""
    return m.frame_start + (int(log_word(board.log, i, k, 0)) & CLOCKS)


@wp.func
def read_span(board: Shared, i: int, m: Registers, k: int):
    """Read all that the beam meets in span k."""
    flags = log_word(board.log, i, k, 0) >> wp.uint32(18)
    colors = log_word(board.log, i, k, 1)
    shapes = log_word(board.log, i, k, 2)
    positions = log_word(board.log, i, k, 3)
    sizes = log_word(board.log, i, k, 4)
    field = log_word(board.log, i, k, 5)
    m.mirror_playfield = bit(flags, 0)
    m.hmove_blank = bit(flags, 1)
    m.stars = bit(flags, 2)
    m.stars_line = int(flags >> wp.uint32(3)) & 3
    for p in range(2):
        m.mirror[p] = bit(flags, 5 + p)
        m.skip[p] = bit(flags, 7 + p)
        m.hide[p] = bit(flags, 9 + p)
        m.shape[p] = byte(shapes, p)
        m.old_shape[p] = byte(shapes, 2 + p)
        m.size[p] = byte(sizes, p)
    for p in range(3):
        m.delay[p] = bit(flags, 11 + p)
        m.enabled[p] = bit(field, 20 + p)
    for p in range(4):
        m.color[p] = byte(colors, p)
        m.position[p] = byte(positions, p)
    m.vblank = byte(sizes, 2)
    m.position[4] = byte(sizes, 3)
    m.playfield = int(field) & 0xFFFFF
    m.old_ball = bit(field, 23)
    m.control = byte(field, 3)


@wp.func
def put_off(board: Shared, i: int, m: Registers, outer: Outer, until: int):
    """Log what the beam will meet until a clock, instead of following it."""
    stop = wp.min(until, picture_end(m, outer))
    if m.swept < stop:
        write_span(board, i, m, board.n_spans)
        board.n_spans += 1
        pass_by(m, stop)
        if board.n_spans == MOST_SPANS:
            m.ended = CATCH_UP


sweep_noinline, put_off_noinline = noinline(sweep), noinline(put_off)


@wp.func
def replay(board: Shared, i: int, m: Registers, outer: Outer, first: int, begin: int, end: int):
    """Follow the beam between two clocks, the first of which lies in span `first`."""
    k = int(first)
    until = int(begin)
    m.swept = begin
    while m.swept < end:
        if m.swept == until:
            read_span(board, i, m, k)
            m.swept = span_begin(board, i, m, k)
            pass_by(m, begin)
            if k == board.n_followed:
                m.collisions = 0  # those before were found before
            k += 1
            until = end
            if k < board.n_spans:
                until = wp.min(end, span_begin(board, i, m, k))
        if on_a_cpu():
            sweep_noinline(board, i, m, outer, until)
        else:
            sweep_line(board, i, m, outer, until)


@wp.func
def catch_up(board: Shared, i: int, m: Registers, outer: Outer):
    """Find the collisions of the spans in the log; if it is full, also draw them, and empty it."""
    draw = board.draw
    is_full = board.n_spans == MOST_SPANS
    first = board.n_followed
    board.draw = 0
    if is_full and draw != 0:
        first = 0
        board.draw = 1
    if first < board.n_spans:
        beam = Console()
        beam.frame_start = m.frame_start
        replay(board, i, beam, outer, first, span_begin(board, i, m, first), m.swept)
        if board.n_followed < board.n_spans:  # else these spans were only drawn
            m.collisions |= beam.collisions
    board.draw = draw
    if is_full:
        board.n_spans = 0
    board.n_followed = board.n_spans


@wp.func
def draw_line(board: Shared, i: int, m: Registers, outer: Outer, begin: int, end: int):
    """Draw the clocks of a line that are in the log."""
    low = int(0)  # the line begins in this span, or before the log
    high = board.n_spans
    while high - low > 1:
        middle = (low + high) // 2
        if span_begin(board, i, m, middle) <= begin:
            low = middle
        else:
            high = middle
    if board.n_spans > 0:
        replay(board, i, m, outer, low, wp.max(begin, span_begin(board, i, m, 0)), end)


@wp.func
def looks_the_same(m: Registers, outer: Outer, register: int, value: int, draw: int) -> bool:
    """Return True if a write certainly changes no pixel and no collision, so the beam need not catch up first.

    These are sounds, motions before HMOVE, and repeated values; also colours while nothing is drawn.
    """
    if is_late(m, outer) or register == 0x00:
        return False
    if register == 0x01:
        return (value & 2) == (m.vblank & 2)
    for k in range(4):
        if register == 0x06 + k:
            return draw == 0 or (value >> 1) == (m.color[k] >> 1)
    if register == 0x0D:
        return (value >> 4) == (m.playfield & 0x0F)
    if register == 0x0E:
        return value == ((m.playfield >> 4) & 0xFF)
    if register == 0x0F:
        return value == (m.playfield >> 12)
    for k in range(2):
        if register == 0x1B + k:
            other = 1 - k
            its_own = m.delay[k] != 0 or value == m.shape[k]
            its_twin = m.delay[other] == 0 or m.old_shape[other] == m.shape[other]
            return its_own and its_twin and (k == 0 or m.delay[2] == 0 or m.old_ball == m.enabled[2])
        if register == 0x1D + k:
            return m.hide[k] != 0 or ((value >> 1) & 1) == m.enabled[k]
    if register == 0x1F:
        return m.delay[2] != 0 or ((value >> 1) & 1) == m.enabled[2]
    if register == 0x22:
        return m.cycles * 3 != outer.hmove_clock + 63  # else stars begin
    sound = register >= 0x15 and register <= 0x1A
    motion = (register >= 0x20 and register <= 0x24) or register == 0x2B
    return sound or motion or register == 0x02 or register == 0x03 or register > 0x2C


@wp.func
def follow_beam(board: Shared, i: int, m: Registers, outer: Outer, touches: int, reads: int, writes: int):
    """Follow the beam before a write changes the picture, a collision is read, or the frame is cut short.

    Or put that off; an instruction that reads collisions then waits, see `Board.waits`.
    """
    is_last = m.n_instructions == MOST_INSTRUCTIONS - 1
    until = m.cycles * 3
    if touches != 0 and writes != 0:
        register = m.address & 0x3F
        until += write_delay(m, register)
        if reads == 0 and not is_last and looks_the_same(m, outer, register, m.value, board.draw):
            outer.unfollowed = until
            return
    elif touches == 0 or (m.address & 8) != 0:
        if not is_last:
            return
        until = outer.unfollowed
    if not puts_off(board):
        sweep(board, i, m, outer, until)
        return
    if on_a_cpu():
        put_off_noinline(board, i, m, outer, until)
    else:
        put_off(board, i, m, outer, until)
    if touches != 0 and writes != 0 and (m.address & 0x3F) == 0x2C:  # CXCLR forgets what was not found
        board.n_followed = board.n_spans
    elif touches != 0 and reads != 0 and board.n_followed < board.n_spans:
        m.ended = CATCH_UP
        m.n_instructions -= 1  # it is counted when it has its answer
        board.waits = 1
