"""Small models' training steps, compiled for an H200, and what their programs hold: `python -m tests.h200_programs`.

Prints one JSON object: by model its facts. In a process of its own, which plans for GPUs and nothing else.
"""

import json
import math
import sys
import tempfile

import numpy as np

BATCH = 4
TOKENS = 72  # of no other axis
WIDTH = 128  # of the stream: its gradients have so many elements a token; a router's choice sorts fewer
ENCODER = (
    "model.encoder={vocab_size: 3000, hidden_size: 128, num_hidden_layers: 1, num_attention_heads: 2, "
    "intermediate_size: 256, max_position_embeddings: 80, pad_token_id: 0}"
)


def text(**more) -> dict:
    ids = np.ones((BATCH, TOKENS), np.int32)
    return {"input_ids": ids, "attention_mask": ids, **more}


def bert():
    data = text(labels=np.zeros(BATCH, np.int32))
    return "configs/criteria_tiny.yaml", [ENCODER, f"data.max_length={TOKENS}"], data


def memory_lm():
    sizes = {"hidden_dim": 128, "num_heads": 2, "intermediate_dim": 256, "num_layers": 2}
    data = text(labels=np.ones((BATCH, TOKENS), np.int32), lengths=np.full(BATCH, TOKENS, np.int32))
    overrides = [f"model.{key}={value}" for key, value in sizes.items()]
    return "configs/memory_lm_tiny.yaml", [*overrides, f"data.max_length={TOKENS}"], data


def hjepa():
    overrides = [
        "model.vit={patch_size: 16, embed_dim: 128, depth: 1, num_heads: 2, in_chans: 3}",
        "model.predictor={depth: 1, num_heads: 2}",
        "data.image_size=144",  # 81 patches and the class token: odd and even lengths
        "masking.kind=ragged",
        "masking.where=loader",
    ]
    image = np.zeros((BATCH, 3, 144, 144), np.float32)
    return "configs/hjepa_digits.yaml", overrides, {"image": image, "mask": np.arange(81) < np.full((BATCH, 1), 40)}


def timm_vit():
    return None, [], None


CASES = {"bert": bert, "memory_lm": memory_lm, "hjepa": hjepa, "timm_vit": timm_vit}
LENGTHS = {"bert": {TOKENS}, "memory_lm": {TOKENS}, "hjepa": {82, 81}, "timm_vit": {65}}  # of attention


def trainer_of(name: str, devices: list):
    from jaxtrain import config_io
    from jaxtrain.train.trainer import Trainer

    settings = ["precision.policy=bf16", f"data.batch_size={BATCH}", f"run.dir={tempfile.mkdtemp()}", "run.quiet=true"]
    settings += ["train.steps=2", "data.placement=host", "train.steps_per_call=1"]
    if name == "timm_vit":
        return vision_transformer(settings, devices)
    config_file, overrides, data = CASES[name]()
    task, config = config_io.load(config_file, [*overrides, *settings])
    return Trainer(train_dataset=data, config=config, task=task, devices=devices, abstract=True)


def vision_transformer(settings: list, devices: list):
    import torch

    from jaxtrain import Trainer, TrainingConfig
    from torch_bridge.torchvision_operators import declare_torchvision

    declare_torchvision()
    import timm

    module = timm.create_model(
        "vit_tiny_patch16_224", img_size=128, depth=1, embed_dim=128, num_heads=2, num_classes=10
    )
    rows = [(torch.zeros(3, 128, 128), 0)] * BATCH
    given: dict = {"batch_size": BATCH, "use_mixed_precision": True, "output_dir": tempfile.mkdtemp()}
    config = TrainingConfig(**given, train={"steps": 2}, data={"placement": "host"}, run={"quiet": True})
    loss = torch.nn.functional.cross_entropy
    return Trainer(module, rows, None, config, loss=loss, devices=devices, abstract=True)


def facts(name: str, devices: list) -> dict:
    import jax

    from jaxtrain.nn import fused_attention
    from jaxtrain.runtime.hlo import Program

    fused_attention.chosen.clear()
    with fused_attention.planned_for((9, 0)):
        program = trainer_of(name, devices).program
        arguments = program.abstract_arguments()
        compiled = program.train_step().jitted.lower(*arguments).compile()
    read = Program(compiled.as_text())
    everything = [(each, near) for near in read.computations.values() for each in near.values()]
    shapes = [dims for each, _ in everything for _, dims in each.shapes]
    square = [dims for dims in shapes if len(dims) >= 2 and dims[-1] in LENGTHS[name] and dims[-1] == dims[-2]]
    floats = ("f32", "bf16", "f16")
    kinds = lambda each, near: [near[o].shapes[0][0] for o in each.operands if o in near and near[o].shapes]
    products = [
        (each, near)
        for each, near in everything
        if each.opcode == "dot" or each.attribute("custom_call_target").startswith("__cublas")
    ]
    memory = compiled.memory_analysis()
    state = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(arguments[0]))
    return {
        "sorts_of_activations": [
            f"{each.shapes} {read.source(each)}"
            for each, near in everything
            if each.opcode == "sort"
            and set(kinds(each, near)) & set(floats)
            and each.elements >= BATCH * TOKENS * WIDTH
        ],
        "float32_products": [
            f"{each.shapes} {read.source(each)}"
            for each, near in products
            if kinds(each, near)[:2] == ["f32", "f32"] and "metrics.py" not in read.source(each)
        ],
        "token_by_token": sorted({str(dims) for dims in square if math.prod(dims[:-2]) > 1 or len(dims) == 2}),
        "attention": dict(fused_attention.chosen),
        "state_bytes": state,
        "aliased_bytes": memory.alias_size_in_bytes,
        "largest_copy_bytes": max((each.size for each, _ in everything if each.opcode == "copy"), default=0),
    }


def sent(name: str, devices: list) -> list[int]:
    """Bytes that each of these devices sends in a step under ddp, and the fewest that it could."""
    from jaxtrain import config_io, planned_step
    from jaxtrain.nn import fused_attention

    config_file, overrides, data = CASES[name]()
    settings = ["precision.policy=bf16", f"data.batch_size={len(devices)}", f"run.dir={tempfile.mkdtemp()}"]
    task, config = config_io.load(config_file, [*overrides, *settings, "train.steps=2", "data.placement=host"])
    rows = {key: np.repeat(values, -(-len(devices) // BATCH), axis=0) for key, values in data.items()}
    with fused_attention.planned_for((9, 0)):
        made = planned_step.compile_step(task, config, devices, rows)
    return [sum(entry["bytes"] for entry in made["collectives"].values()), sum(made["minimum_bytes"].values())]


def main() -> None:
    from jaxtrain.runtime import topology

    topology.prepare()
    found = {name: facts(name, topology.devices("h200", 1)) for name in sys.argv[1:] or CASES}
    found |= {f"{name} on 8": sent(name, topology.devices("h200", 8)) for name in ("bert", "memory_lm")}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
