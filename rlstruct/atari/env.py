"""Atari: B consoles as a VecEnv, with the preprocessing of Machado et al. (2018), on the CPU or a CUDA device.

"Revisiting the Arcade Learning Environment: Evaluation Protocols and Open Problems for General Agents" (JAIR, 2018), as
gymnasium's ``AtariPreprocessing`` and ``FrameStackObservation`` do it around ale-py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import warp as wp
from gymnasium import spaces
from torch import Tensor

from rlstruct import renamed
from rlstruct.atari.ale_game import StartState, load_game, rom_ids, start_state, start_states
from rlstruct.atari.games import RULES
from rlstruct.atari.machine import FIELDS, Consoles, place_consoles, run_consoles
from rlstruct.atari.picture import WIDTH, View, area_weights, render
from rlstruct.atari.scoring import LIVES, OVER, Scorer
from rlstruct.device import DeviceLike
from rlstruct.errors import BadValueError
from rlstruct.functional.random import randint, uniform
from rlstruct.sims.kernels import launch
from rlstruct.sims.tensor_env import TensorEnv

MOST_FRAMES = 108_000
"""Frames of an episode: half an hour, as ALE counts it."""
_CUT_LAST, _CUT_EARLIER, _FIRST = 1, 2, 3  # codes for `render`: ended in the last frame or before; first frame


@dataclass(frozen=True)
class AtariState:
    """State of B consoles."""

    registers: Tensor  # of the chips, see `rlstruct.atari.FIELDS`.  [B, F] int32
    ram: Tensor  # 128 bytes of the console, 128 of the cartridge.  [B, 256] uint8
    screens: Tensor  # the last two pictures that were drawn.  [B, 2, lines * 160] uint8
    frames: Tensor  # the observation.  [B, stack, height, width] or [..., 3] uint8
    action: Tensor  # the console's last action, as ALE numbers it.  [B] int32
    tally: Tensor  # score, lives, game over, a byte that the rules remember, sets; see `scoring`.  [B, 5] int32


@renamed.members
class Atari(TensorEnv[AtariState]):
    """B consoles that play one game. The ROM, colours and start states come from your ale-py.

    Args:
        game: gymnasium's name of the game, such as ``"SpaceInvaders"`` or ``"ALE/SpaceInvaders-v5"``.
        n_envs: B.
        seed: environment j draws its start states and sticky actions from ``seed + j``.
        device: where the consoles live.
        auto_reset: restart ended games within the step.
        time_limit: in steps; ``"default"`` for 108,000 frames.
        backend: ``"warp"``; there is no other.
        frame_skip: frames for which an action is held.
        sticky: probability that a frame repeats the previous frame's action.
        brighter: show the brighter of the last two frames at each pixel.
        gray: show brightness instead of red, green and blue.
        size: height and width of the observation; None for 160 pixels by all lines.
        stack: number of recent pictures in an observation. For training use 1, and let `rlstruct.agents.StackingAgent`
            stack: it learns the same, and a batch takes a quarter of the memory.
        episodic_lives: end an episode when a life is lost.
        noop_max: begin an episode after 1 to this many no-op frames; 0 for none.
        fire_on_reset: press FIRE for one step before an episode begins, in games that use it.
        full_actions: offer all of ALE's actions, not only those that have an effect in this game.
        draw_all: draw every frame, not only those that are shown. Frames that end early keep older pixels, which equal
            ALE's only if every frame was drawn.

    Raises:
        ValueError: an argument is out of range, or the game is not supported.
        ImportError: Warp or ale-py is not installed.
    """

    _starts_ahead = 1

    def __init__(
        self,
        game: str,
        n_envs: int,
        seed: int = 0,
        *,
        device: DeviceLike = "cpu",
        auto_reset: bool = True,
        time_limit: int | Literal["default"] | None = "default",
        backend: Literal["warp"] = "warp",
        frame_skip: int = 4,
        sticky: float = 0.25,
        brighter: bool = True,
        gray: bool = True,
        size: int | None = 84,
        stack: int = 4,
        episodic_lives: bool = False,
        noop_max: int = 30,
        fire_on_reset: bool = False,
        full_actions: bool = False,
        draw_all: bool = False,
    ) -> None:
        if backend != "warp":
            raise BadValueError(f"Atari: got backend={backend!r}, expected 'warp': the console is a Warp kernel.")
        if min(frame_skip, stack) < 1 or noop_max < 0 or not 0 <= sticky < 1:
            raise BadValueError(
                f"Atari: got frame_skip={frame_skip}, stack={stack}, noop_max={noop_max}, sticky={sticky}; expected "
                "at least 1, 1 and 0, and a probability below 1."
            )
        self.frame_skip, self.sticky, self.draw_all = frame_skip, sticky, draw_all
        self.episodic_lives = episodic_lives
        name = _find(game)
        self.game = load_game(name)
        begun = start_states(name, noop_max, fire=frame_skip if fire_on_reset else 0)
        first = begun[0]
        lines = first.screens.shape[1]
        self.actions = self.game.legal if full_actions else self.game.actions
        self.action_space = spaces.Discrete(len(self.actions))
        height, width = (lines, WIDTH) if size is None else (size, size)
        if not (lines / 3 <= height <= lines and WIDTH / 3 <= width <= WIDTH):
            raise BadValueError(
                f"Atari: got size={size}, expected {-(-lines // 3)} to {WIDTH}, or None for all pixels."
            )
        shape = (stack, height, width) if gray else (stack, height, width, 3)
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        limit = MOST_FRAMES // frame_skip if time_limit == "default" else time_limit
        self._reader = Consoles(self.game.rom, first.state.mapper, 1, game=name, device=device)
        super().__init__(n_envs, seed, device=device, auto_reset=auto_reset, time_limit=limit, backend="torch")
        self.backend = "warp"
        self._prepare(gray, brighter and frame_skip > 1, lines, height, width)
        self._places = self.from_start_states(begun)

    def _prepare(self, gray: bool, brighter: bool, lines: int, height: int, width: int) -> None:
        """Copy constants to the device."""
        self._chosen = torch.tensor(self.actions, dtype=torch.int32, device=self._device)
        self._board, self._view = self._reader.board, View()
        self._scorer = Scorer(RULES[self.game.name], self._device)
        palette = np.ascontiguousarray((self.game.gray if gray else self.game.colors).T, np.float32)
        # Copied by torch: Warp would use another stream, which nothing waits for.
        tables = {"palette": palette, "rows": area_weights(lines, height), "columns": area_weights(WIDTH, width)}
        for name, table in tables.items():
            setattr(self._view, name, wp.from_torch(torch.tensor(table, dtype=torch.float32, device=self._device)))
        self._view.channels, self._view.brighter = (1 if gray else 3), int(brighter)

    def initial(self, key: Tensor) -> AtariState:
        """Draw one of the cached start states."""
        rows = randint(key, self._places.ram.shape[0], stream=0)
        return AtariState(**{name: value.index_select(0, rows) for name, value in vars(self._places).items()})

    def transition(self, state: AtariState, action: Tensor, key: Tensor) -> tuple[AtariState, Tensor, Tensor]:
        """Play the frames of one step."""
        registers, ram, screens, tally = (
            value.clone() for value in (state.registers, state.ram, state.screens, state.tally)
        )
        chosen, taken = self._chosen[action], state.action
        running, rewards, cut = torch.ones_like(chosen), torch.zeros_like(chosen), torch.zeros_like(chosen)
        consoles = place_consoles(self._board, (registers, ram, screens))
        memory, tallies, who, paid = map(wp.from_torch, (ram, tally, running, rewards))
        draws = uniform(key, (self.frame_skip,), stream=0) if self.sticky else None
        for frame in range(self.frame_skip):
            taken = chosen if draws is None else torch.where(draws[:, frame] < self.sticky, taken, chosen)
            last = frame == self.frame_skip - 1
            draw = self.draw_all or frame >= self.frame_skip - 2
            run_consoles(self._board, consoles, taken, who, draw=draw)
            self._scorer.count(memory, tallies, who, paid)
            ended = tally[:, OVER] != 0
            if self.episodic_lives:
                ended = ended | (tally[:, LIVES] < state.tally[:, LIVES])
            ended_now = ended & (running != 0)
            # As gymnasium, which reads no picture once a game is over: single frames stay those of the previous step.
            cut.masked_fill_(ended_now, _CUT_LAST if last and self._view.brighter else _CUT_EARLIER)
            running.masked_fill_(ended_now, 0)
        rendered = self._render(state.screens, screens, registers, cut, state.frames[:, -1])
        frames = torch.cat([state.frames[:, 1:], rendered.unsqueeze(1)], 1)
        moved = AtariState(registers, ram, screens, frames, taken, tally)
        return moved, rewards.to(torch.float32), cut != 0

    def observe(self, state: AtariState) -> Tensor:
        """Show the stack."""
        return state.frames

    def screen(self, row: int) -> Tensor:
        """Return the last full picture of one console in red, green and blue.  [lines, 160, 3] uint8."""
        self._check_begun("screen")
        last = self._carry["state/registers"][row, FIELDS.index("n_frames")] & 1
        picture = self._carry["state/screens"][row, last.long()].view(-1, WIDTH)
        shown: Tensor = torch.from_numpy(self.game.colors).to(self._device)[picture.long()]
        return shown

    def state_of(self, ales: Sequence[Any]) -> AtariState:
        """Read the current states of K ``ale_py.ALEInterface`` with the same game, for `set_state`.  [K, ...].

        Their frame stacks repeat the current screen.
        """
        return self.from_start_states([start_state(ale) for ale in ales])

    def from_start_states(self, begun: Sequence[StartState]) -> AtariState:
        """Convert K start states of ALE to ours.  [K, ...]."""
        registers, ram = (t.to(self._device) for t in self._reader.read([place.state for place in begun]))
        tally = self._scorer.begin(ram, [place.lives for place in begun])
        pictures = np.stack([place.screens for place in begun]).reshape(len(begun), 2, -1)
        last = registers[:, FIELDS.index("n_frames")] & 1
        screens = torch.from_numpy(pictures).to(self._device)
        screens = torch.where((last == 1).view(-1, 1, 1), screens, screens.flip(1)).contiguous()
        height, *rest = (self.observation_space.shape or ())[1:]
        frames = torch.zeros(len(begun), height, *rest, dtype=torch.uint8, device=self._device)
        frames = self._render(screens, screens, registers, torch.full_like(last, _FIRST), frames)
        stack = frames.unsqueeze(1).repeat_interleave((self.observation_space.shape or ())[0], 1)
        return AtariState(registers, ram, screens, stack, torch.zeros_like(last), tally)

    def _render(self, before: Tensor, after: Tensor, registers: Tensor, cut: Tensor, shown: Tensor) -> Tensor:
        """Render one picture per console; games that ended earlier in the step keep their last one."""
        frames = shown.clone()
        pixels = frames if frames.dim() == 4 else frames.unsqueeze(3)
        last = (registers[:, FIELDS.index("n_frames")] & 1).contiguous()
        n, height, width = pixels.shape[:3]
        threads = width if pixels.is_cuda else 1  # for a line
        launch(self._device, render, (n, height, threads), self._view, before, after, last, cut, pixels, threads)
        return frames


def _find(game: str) -> str:
    """Return ALE's name of a game, from ALE's or gymnasium's."""
    short = game.removeprefix("ALE/").rsplit("-v", 1)[0]
    name = rom_ids().get(short, short)
    if name not in RULES:
        raise BadValueError(f"Atari: got the game {game!r}, expected one of {', '.join(sorted(RULES))}.")
    return name
