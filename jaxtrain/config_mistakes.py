"""Explain the mistakes of a config, all together: each key, what it holds and wants, and the nearest key."""

import difflib
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import pydantic

from jaxtrain.errors import UserError, shortened

NO_SETTING = {  # names of other libraries without a setting here, with what there is
    "device": "JAX takes the accelerator that it finds; JAX_PLATFORMS=cpu in the environment chooses another",
    "accelerator": "JAX takes the accelerator that it finds; JAX_PLATFORMS=cpu in the environment chooses another",
    "gpus": "JAX takes every device of the process; shard.devices=N limits them, torchrun adds processes",
    "loss": "it goes to Trainer(model, data, None, config, loss=torch.nn.CrossEntropyLoss())",
    "loss_fn": "it goes to Trainer(model, data, None, config, loss=torch.nn.CrossEntropyLoss())",
    "criterion": "it goes to Trainer(model, data, None, config, loss=torch.nn.CrossEntropyLoss())",
    "metrics": "they go to Trainer(..., metrics={'accuracy': function}); evaluation.metric selects the best",
    "callbacks": "they go to Trainer(..., callbacks=[...])",
}
ELSEWHERE = {  # names that other libraries have for a setting, and that no spelling leads to
    "optimizer": "optim.name",
    "betas": "optim.beta1",
    "wd": "optim.weight_decay",
    "bs": "data.batch_size",
    "grad_clip": "optim.clip_norm",
    "gradient_clip": "optim.clip_norm",
    "clip_grad": "optim.clip_norm",
    "early_stopping": "evaluation.patience",
    "fp16": "precision.policy",
    "bf16": "precision.policy",
    "amp": "precision.policy",
    "logging_steps": "train.log_every_steps",
    "log_every_n_steps": "train.log_every_steps",
    "eval_steps": "evaluation.every_steps",
    "save_steps": "checkpoint.every_steps",
    "random_state": "seed",
    "random_seed": "seed",
    "name": "run.name",
}


class WrongSettings(UserError):
    """Error that lists the mistakes of a config. first: what is wrong with the first value, without its key."""

    def __init__(self, text: str, first: str):
        super().__init__(text)
        self.first = first


def told(
    kind: type[pydantic.BaseModel],
    error: pydantic.ValidationError,
    source: str | pathlib.Path,
    other_names: Mapping[str, str],
) -> WrongSettings:
    """Return one UserError that lists every mistake. source: the file or class. other_names: names that the schema
    accepts besides its keys, with the keys that they mean."""
    errors = error.errors(include_url=False)
    lines = [_explain(kind, one, other_names) for one in errors]
    count = f"{len(lines)} mistakes" if len(lines) > 1 else "a mistake"
    return WrongSettings(f"{source}: {count}\n  " + "\n  ".join(lines), errors[0]["msg"].removeprefix("Value error, "))


def settings(kind: type[pydantic.BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every key of a schema, as `section.key`, with its annotation."""
    for name, field in kind.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, pydantic.BaseModel):
            yield from settings(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.annotation


def dotted_keys(kind: type[pydantic.BaseModel]) -> list[str]:
    """Return every key of a schema, as `section.key`."""
    return [key for key, _ in settings(kind)]


def _explain(kind: type[pydantic.BaseModel], error: Mapping[str, Any], other_names: Mapping[str, str]) -> str:
    where = [str(part) for part in error["loc"]]
    key = ".".join(where) or "config"
    if error["type"] == "extra_forbidden":
        return f"{key}: unknown key{_suggestion(kind, where, other_names)}"
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message[0].lower() + message[1:]}, got {shortened(repr(error['input']))}"


def _suggestion(kind: type[pydantic.BaseModel], where: list[str], other_names: Mapping[str, str]) -> str:
    section: Any = kind
    for part in where[:-1]:
        section = section.model_fields[part].annotation if part in getattr(section, "model_fields", {}) else None
    known = list(getattr(section, "model_fields", {}))
    name, inside, every = where[-1], ".".join(where[:-1]), dotted_keys(kind)
    if name in every:
        *sections, leaf = name.split(".")
        return f"; a file nests it: {': {'.join([*sections, leaf])}: ...{'}' * len(sections)}"
    accepted = {key: key for key in known}
    meant = [(other, key) for other, full in other_names.items() for key in (full, full.partition(".")[2])]
    names = {other: key for other, key in reversed(meant) if key in every}
    if inside or not set(other_names.values()) <= set(every):  # a section does not take the other names
        accepted = {other: key.removeprefix(f"{inside}.") for other, key in names.items()} | accepted
    else:
        accepted |= {other: other for other in names}
    if name in NO_SETTING and not inside and name not in accepted:
        return f"; {NO_SETTING[name]}"
    if (meant_key := ELSEWHERE.get(name)) in every and not inside:
        return f", did you mean `{meant_key}`?"
    near = difflib.get_close_matches(name, accepted, 1, cutoff=0.6)
    if near:
        return f", did you mean `{accepted[near[0]]}`?"
    everywhere = {leaf: full for full in every for leaf in [full.rsplit(".", 1)[-1]]}
    if name in everywhere:
        return f", did you mean `{everywhere[name]}`?"
    return f"; known here: {', '.join(known)}" if known else ""
