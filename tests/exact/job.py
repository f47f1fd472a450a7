"""What every rank does for the cells of the matrix."""

from __future__ import annotations

import gc
from typing import Any

import torch
from torch import nn

from tests.exact.cells import DECAY, LAYERS, LR, Cell, Ends, Layer, masks_of, parameter_names, partition, user_frozen_names
from tests.exact.reference import counts_together, inputs_of


def run_cells(cells: list[Cell]) -> list[dict[str, Any]]:
    """One record per cell, one after the other in the same processes."""
    records = []
    for cell in cells:
        try:
            records.append(run_cell(cell))
        except Exception as error:
            raise AssertionError(f"cell {cell.name}") from error
        gc.collect()
    return records


def build(cell: Cell, block: dict[str, Any] | None = None) -> Any:
    """The cell's engine; ``block`` replaces the "rlfreeze" block."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    import rlfreeze_ds

    layers: list[Any] = [LayerSpec(Layer) for _ in range(LAYERS)]
    if cell.tied:
        layers[0] = layers[-1] = TiedLayerSpec("ends", Ends)
    model = pipeline_of(cell, layers)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in user_frozen_names(cell))
    config = cell.config()
    if block is not None:
        config["rlfreeze"] = block
    return rlfreeze_ds.initialize(model=model, config=config, **optimizer_arguments(cell, model))[0]


def pipeline_of(cell: Cell, layers: list[Any]) -> Any:
    """A pipeline cut at the cell's own bounds."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    class Cut(PipelineModule):
        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = partition(cell)
            stage = self._topo.get_coord(self.global_rank).pipe
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    return Cut(
        layers,
        topology=PipeDataParallelTopology(num_pp=cell.stages, num_dp=cell.dp),
        loss_fn=nn.functional.mse_loss,
        seed_layers=True,
        base_seed=7,
    )


def optimizer_arguments(cell: Cell, model: Any) -> dict[str, Any]:
    """What a user would hand to ``initialize`` besides model and config."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if cell.optimizer == "client adamw":
        return {"optimizer": torch.optim.AdamW(trainable, lr=LR, weight_decay=DECAY)}
    if cell.optimizer == "cpu adam":
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return {"optimizer": DeepSpeedCPUAdam(trainable, lr=LR, weight_decay=DECAY)}
    if cell.optimizer == "groups":
        gains = [p for p in trainable if p.numel() == 1]
        others = [p for p in trainable if p.numel() > 1]
        groups = [{"params": gains, "lr": 2 * LR, "weight_decay": 0.0}, {"params": others}]
        return {"optimizer": torch.optim.AdamW(groups, lr=LR, weight_decay=DECAY)}
    return {}


def run_cell(cell: Cell) -> dict[str, Any]:
    """Train with the cell's masks."""
    engine = build(cell)
    force_masks(engine, cell, masks_of(cell))
    names = {id(p): _local_name(engine, name) for name, p in engine.module.named_parameters()}
    trained = [(names[id(p)], p) for p in engine.module.parameters() if p.requires_grad]
    record: dict[str, Any] = {
        "first": {names[id(p)]: p.detach().clone() for p in engine.module.parameters()},
        "masters": [], "weights": [], "norms": [], "losses": [], "rates": [], "untouched": [], "moved": [],
        "factors": watch_clipping(engine),
        "dp_rank": engine.grid.get_data_parallel_id(),
    }  # fmt: skip
    replica = record["dp_rank"]
    for step, masks in enumerate(masks_of(cell)):
        before = {name: parts(engine, cell, parameter) for name, parameter in trained}
        record["rates"].append(inner(engine).param_groups[-1]["lr"])
        batch = iter([inputs_of(cell, step, m, replica) for m in range(cell.micro_batches)])
        record["losses"].append(float(engine.train_batch(batch)))
        record["norms"].append(float(engine._global_grad_norm) if cell.flat else None)
        after = {name: parts(engine, cell, parameter) for name, parameter in trained}
        wholly = set.intersection(*masks)
        for name in wholly & set(before):
            same = all(
                torch.equal(before[name][key][1], after[name][key][1]) if key in before[name]
                else not after[name][key][1].any()  # its first state
                for key in after[name] if not (key == "step" and counts_together(cell))
            )  # fmt: skip
            record["untouched"].append((step, name, same))
        for name in set(before) - wholly:
            same = torch.equal(before[name]["master"][1], after[name]["master"][1])
            if before[name]["master"][1].numel():
                record["moved"].append((step, name, not same))
        record["masters"].append({name: after[name]["master"] for name in after})
        record["weights"].append({name: p.detach().clone() for name, p in trained})
    record["flags"] = [p.requires_grad for _, p in trained]
    record["frozen for ever"] = {
        names[id(p)]: torch.equal(p, record["first"][names[id(p)]]) for p in engine.module.parameters() if not p.requires_grad
    }
    record["state sizes"] = sum(
        value.numel() for state in inner(engine).state.values() for value in state.values() if torch.is_tensor(value)
    )
    return record


def watch_clipping(engine: Any) -> list[float | None]:
    """By what each step's fp32 clipping multiplied the gradients, measured on them; None where there were none."""
    factors: list[float | None] = []
    stock = engine.clip_fp32_gradients

    def clip() -> None:
        gradients = [p.grad for p in engine.module.parameters() if p.grad is not None]
        before = [gradient.norm() for gradient in gradients]
        stock()
        after = [gradient.norm() for gradient in gradients]
        factors.append(float(sum(after) / sum(before)) if gradients else None)

    engine.clip_fp32_gradients = clip
    return factors


def inner(engine: Any) -> Any:
    """The optimizer that holds the moments."""
    return getattr(engine.optimizer, "optimizer", engine.optimizer)


def parts(engine: Any, cell: Cell, parameter: nn.Parameter) -> dict[str, tuple[int, torch.Tensor]]:
    """Copies of what belongs to a parameter on this rank: weight, master and moments, each with its offset in the parameter."""
    found = {"weight": (0, parameter.detach().clone())}
    if not cell.flat:
        state = inner(engine).state.get(parameter, {})
        found["master"] = found["weight"]
        found |= {key: (0, torch.as_tensor(v).clone()) for key, v in state.items() if v is not None}
        return found
    mapping = parameter._hp_mapping
    if mapping is None:
        found["master"] = (0, torch.empty(0))
        return found
    start = mapping.lp_fragment_address.start
    found["master"] = (start, mapping.hp_fragment.detach().clone())
    address = mapping.hp_fragment_address
    flat = inner(engine).param_groups[mapping.param_group_index]["params"][0]
    for key, value in inner(engine).state.get(flat, {}).items():
        if torch.is_tensor(value) and value.shape == flat.shape:
            found[key] = (start, value[address.start : address.start + address.numel].clone())
    return found


def force_masks(engine: Any, cell: Cell, plan: list[list[set[str]]]) -> None:
    """Make the engine's controller hand out ``plan``."""
    from rlfreeze_ds.controller import StepMasks

    controller = engine.freeze_controller
    names = [_local_name(engine, unit.name) for unit in controller.units]

    def begin_step(num_micro_batches: int) -> StepMasks:
        masks = plan[controller.step]
        assert len(masks) == num_micro_batches
        return StepMasks(
            controller.step, "test", tuple(tuple(i for i, n in enumerate(names) if n in mask) for mask in masks)
        )

    def first_stage_frozen(num_micro_batches: int) -> bool:
        first_stage = {name for name in parameter_names(cell) if int(name.split(".")[0]) < partition(cell)[1]}
        return first_stage <= set.intersection(*plan[controller.step])

    controller.begin_step, controller.first_stage_frozen = begin_step, first_stage_frozen


def _local_name(engine: Any, name: str) -> str:
    """DeepSpeed names a tied layer by its key; here the two ends have the names of their places."""
    if not name.startswith("tied_modules."):
        return name
    place = 0 if engine.is_first_stage() else LAYERS - 1
    return f"{place}.{name.rsplit('.', 1)[-1]}"
