"""Folders as DeepSpeed leaves them, made with torch.save alone.

What lies between and behind the parameters is never zero, so that it would be seen among them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.formats.folders import Edit, change

State = dict[str, torch.Tensor]
Groups = Sequence[Sequence[str]]
GAP, PAD = -77.0, -99.0
MOMENTS = {
    "exp_avg": 1000.0,
    "exp_avg_sq": 2000.0,
}  # what is added to a weight to make the optimizer's value
TAG = "global_step7"
MODEL = "mp_rank_00_model_states.pt"
MODEL_3 = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
OPTIM = "zero_pp_rank_{}_mp_rank_00_optim_states.pt"
ODD = {"a": (7, 5), "b": (3,), "c": (1,), "d": (2, 3, 2), "e": (), "f": (0, 4), "g": (11,)}


def odd(**shapes: tuple[int, ...]) -> State:
    """Parameters of odd sizes, no two elements equal."""
    made: State = {}
    start = 1
    for name, shape in (shapes or ODD).items():
        tensor = torch.empty(shape)
        made[name] = torch.arange(start, start + tensor.numel(), dtype=torch.float32).view(shape)
        start += tensor.numel()
    return made


def small() -> State:
    return odd(a=(7, 5), b=(4,))


def edit_optims(tag: Path, edit: Edit) -> None:
    """Change the state that every rank has."""
    for path in tag.glob("*_optim_states.pt"):
        change(path, lambda content: edit(content["optimizer_state_dict"]))


@dataclass
class Run:
    """A training run: its parameters, how they are cut, and what else is saved with them."""

    state: State  # parameters that are trained
    ranks: int = 2
    stage: int = 2
    groups: Groups | None = None  # names; one group if not given
    buffers: State = field(default_factory=dict)
    frozen: State = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)
    half: torch.dtype | None = None  # of `module`
    gaps: Sequence[Sequence[int]] | None = None  # param_alignment_paddings
    flats: int | None = None  # stage 3: how many equal flat tensors, instead of one for each group
    elastic: bool = False  # the optimizer's state as a list, padding cut off
    steps: bool = True  # whether the optimizer has made one
    trimmed: bool = True  # whether group_paddings are cut off
    client: dict[str, Any] = field(default_factory=lambda: {"epoch": 3})
    prefix: str = ""

    @property
    def names(self) -> list[list[str]]:
        return [list(self.state)] if self.groups is None else [list(names) for names in self.groups]

    @property
    def whole(self) -> State:
        """The weights in full precision."""
        shared = {name: self.state[kept] for name, kept in self.shared.items()}
        halves = torch.float16, torch.bfloat16
        wide = {  # which NaN torch makes of a half depends on the processor
            name: t.float().masked_fill(t.isnan(), float("nan")) if t.dtype in halves else t
            for name, t in self.buffers.items()
        }
        return self.state | self.frozen | shared | wide

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer by name: none are known if its state is a list."""
        if self.stage == 3:
            return [{"lr": 0.1, "params": [name for names in self.names for name in names]}]
        rates = [{} if self.elastic else {"lr": 0.1 * (n + 1)} for n in range(len(self.names))]
        return [{**rate, "params": names} for rate, names in zip(rates, self.names, strict=True)]

    def save(self, folder: Path, latest: bool = True) -> Path:
        """Write the folder; the one with the files of the ranks."""
        tag = folder / TAG
        tag.mkdir(parents=True)
        if latest:
            (folder / "latest").write_text(TAG)
            (folder / "zero_to_fp32.py").write_text("import torch\n")
        for name, value in self.files():
            torch.save(value, tag / name)
        return tag

    def files(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and content of every file."""
        if self.stage < 3:
            yield MODEL, self.model(0)
        for rank in range(self.ranks if self.stage else 0):
            if self.stage == 3:
                yield MODEL_3.format(rank), self.model(rank)
            optimizer = self.optim_3(rank) if self.stage == 3 else self.optim(rank)
            content = {"optimizer_state_dict": optimizer, "ds_config": {}, "ds_version": "0.0"}
            yield f"{self.prefix}{OPTIM.format(rank)}", content

    def model(self, rank: int) -> dict[str, Any]:
        shapes = [OrderedDict((n, self.state[n].shape) for n in names) for names in self.names]
        frozen = {n: self.part(t, rank) if self.stage == 3 else t for n, t in self.frozen.items()}
        content = {
            "module": self.module(),
            "buffer_names": list(self.buffers),
            "optimizer": None,
            "param_shapes": shapes,
            "frozen_param_shapes": OrderedDict((n, t.shape) for n, t in self.frozen.items()),
            "frozen_param_fragments": OrderedDict(frozen),
            "shared_params": self.shared if rank == 0 else {},
            "lr_scheduler": {"last_epoch": 2},
            "global_steps": 7,
            "dp_world_size": self.ranks,
            "mp_world_size": 1,
            "ds_version": "0.0",
        }
        if self.stage < 2:
            content |= {"frozen_param_shapes": None, "frozen_param_fragments": None}
        if self.stage == 0:
            content |= {"param_shapes": None, "shared_params": None}
            content["optimizer"] = {"state": {}, "param_groups": []}
        return {**content, **self.client}

    def module(self) -> OrderedDict[str, torch.Tensor]:
        trained = {
            name: tensor.to(self.half or tensor.dtype) for name, tensor in self.state.items()
        }
        every = trained | self.frozen | {name: trained[kept] for name, kept in self.shared.items()}
        if self.stage == 3:
            every = {name: torch.empty(0, dtype=self.half or torch.float32) for name in every}
        module = OrderedDict({**every, **self.buffers})
        module._metadata = OrderedDict({"": {"version": 1}})  # type: ignore[attr-defined]
        return module

    # Stages 1 and 2

    def flat(self, group: int, shift: float) -> torch.Tensor:
        """The parameters of a group, gaps between them, filled up to a multiple of twice the
        ranks."""
        names = self.names[group]
        gaps = [0] * len(names) if self.gaps is None else self.gaps[group]
        pieces = [
            torch.cat([self.state[name].reshape(-1) + shift, torch.full((gap,), GAP)])
            for name, gap in zip(names, gaps, strict=True)
        ]
        whole = torch.cat([*pieces, torch.empty(0)])
        return torch.cat([whole, torch.full((-len(whole) % (2 * self.ranks),), PAD)])

    def optim(self, rank: int) -> dict[str, Any]:
        every = range(len(self.names))
        size = [len(self.flat(group, 0)) // self.ranks for group in every]
        used = [sum(self.state[name].numel() for name in names) + sum(self.gaps[i] if self.gaps else [])
                for i, names in enumerate(self.names)]  # fmt: skip
        cut = [min(n, max(0, (rank + 1) * n - last)) for n, last in zip(size, used, strict=True)]

        def part(group: int, shift: float, trim: bool) -> torch.Tensor:
            n = size[group]
            whole = self.flat(group, shift)[rank * n : (rank + 1) * n].clone()
            return whole[: n - cut[group]] if trim else whole

        state = [
            {
                "step": torch.tensor(7.0),
                **{k: part(i, shift, self.elastic) for k, shift in MOMENTS.items()},
            }
            for i in every
        ]
        groups = [{"lr": 0.1 * (group + 1), "params": [group]} for group in every]
        base = {"state": dict(enumerate(state)) if self.steps else {}, "param_groups": groups}
        return {
            "clip_grad": 1.0,
            "base_optimizer_state": state if self.elastic else base,
            "single_partition_of_fp32_groups": [part(group, 0, self.trimmed) for group in every],
            **({"zero_stage": self.stage} if self.trimmed else {}),
            "group_paddings": cut,
            "partition_count": [self.ranks for _ in every],
            "param_slice_mappings": [],
            **({} if self.gaps is None else {"param_alignment_paddings": self.gaps}),
        }

    # Stage 3

    def part(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """The share of a rank of a parameter, filled up."""
        share = -(-tensor.numel() // self.ranks)
        pad = 7.0 if tensor.dtype == torch.bool else PAD
        fill = torch.full((share * self.ranks - tensor.numel(),), pad).to(tensor.dtype)
        return torch.cat([tensor.reshape(-1), fill])[rank * share : (rank + 1) * share].clone()

    def optim_3(self, rank: int) -> dict[str, Any]:
        def flats(shift: float) -> list[torch.Tensor]:
            pieces = [
                torch.cat([self.part(self.state[name] + shift, rank) for name in names])
                for names in self.names
            ]
            whole = pieces if self.flats is None else torch.cat(pieces).tensor_split(self.flats)
            return [piece.clone() for piece in whole]

        moments = {key: flats(shift) for key, shift in MOMENTS.items()}
        state = {
            number: {"step": torch.tensor(7.0), **{key: moments[key][number] for key in moments}}
            for number in range(len(flats(0)))
        }
        groups = [{"lr": 0.1, "params": list(range(len(self.names)))}]
        return {
            "zero_stage": 3,
            "partition_count": self.ranks,
            "optimizer_state_dict": {"state": state if self.steps else {}, "param_groups": groups},
            "fp32_flat_groups": flats(0),
        }

    def universal(self, folder: Path) -> Path:
        """The same run as a folder for each parameter."""
        tag = folder / f"{TAG}_universal"
        (folder / "latest_universal").parent.mkdir(parents=True, exist_ok=True)
        (folder / "latest_universal").write_text(tag.name)
        for name, tensor in self.state.items():
            place = tag / "zero" / name
            place.mkdir(parents=True)
            for key, shift in {"fp32": 0.0, **MOMENTS}.items():
                value = tensor + shift
                held = value.reshape(-1) if self.stage == 3 else {"cat_dim": 0, "param": value}
                torch.save(held, place / f"{key}.pt")
            torch.save(torch.tensor(7.0), place / "step.pt")
        groups = [{"lr": 0.1, "params": [0]}]
        settings = {"clip_grad": 1.0, "zero_stage": self.stage, "param_groups": groups}
        torch.save(settings, tag / "zero" / "optimizer_state.pt")
        for name, value in self.files():
            if name.endswith("_model_states.pt"):
                torch.save(value, tag / name)
        return tag
