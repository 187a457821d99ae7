"""The original's prediction functions on a torch model: token probabilities by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError

OUTPUTS = ("dict", "df", "labels")


def build_predict_abilities(
    vocab: Mapping[str, int],
    weapon_vocab: Mapping[str, int],
    pad_token: str = "<PAD>",
    hook: Any = None,
    device: Any = "cpu",
    output_type: str = "dict",
) -> Callable[..., Any]:
    """A function (model, tokens, weapon_id, bypass=False, no_change=False) -> the probability of every token.

    tokens: names; weapon_id: "weapon_id_40". hook: a SetCompletionHook on the model's output layer, whose mode the call
    sets. output_type: dict (in id order), df (a pandas frame, most likely first) or labels (names of at least one
    half). Raises UserError for a name that is not in the vocabularies.
    """
    if output_type not in OUTPUTS:
        raise UserError(f"output_type: got {output_type!r}, wanted one of {', '.join(OUTPUTS)}")
    names = sorted(vocab, key=lambda name: vocab[name])

    @torch.no_grad()
    def predict(
        model: torch.nn.Module,
        tokens: Sequence[str],
        weapon_id: str,
        bypass: bool = False,
        no_change: bool = False,
    ) -> Any:
        unknown = [name for name in tokens if name not in vocab] + [weapon_id] * (weapon_id not in weapon_vocab)
        if unknown:
            raise UserError(f"not in the vocabulary: {', '.join(unknown)}")
        if hook is not None:
            hook.set_mode(bypass, no_change)
        ids = torch.tensor([[vocab[name] for name in tokens]], dtype=torch.long, device=device)
        weapon = torch.tensor([[weapon_vocab[weapon_id]]], device=device)
        model.eval()
        logits = model(ids, weapon, key_padding_mask=ids == vocab[pad_token])
        return _as(output_type, dict(zip(names, logits[0].sigmoid().tolist(), strict=True)))

    return predict


def _as(output_type: str, found: dict[str, float]) -> Any:
    if output_type == "dict":
        return found
    if output_type == "labels":
        return [name for name, p in found.items() if p >= 0.5]
    import pandas as pd

    frame = pd.DataFrame({"ability": list(found), "probability": list(found.values())})
    return frame.sort_values("probability", ascending=False, ignore_index=True)
