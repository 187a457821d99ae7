"""The original's prediction function for torch models: token probabilities by name."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from jaxtrain.errors import UserError

OUTPUTS = ("dict", "df", "labels")


class UnknownName(UserError, KeyError):
    """Raised for an ability or a weapon that the vocabulary lacks; also a KeyError."""

    def __str__(self) -> str:
        return str(self.args[0])


def build_predict_abilities(
    vocab: Mapping[str, int],
    weapon_vocab: Mapping[str, int],
    pad_token: str = "<PAD>",
    hook: Any = None,
    device: Any = None,
    output_type: str = "df",
) -> Callable[..., Any]:
    """Return a function (model, tokens, weapon_id, bypass=False, no_change=False) -> probabilities of all tokens.

    tokens: names; weapon_id: like "weapon_id_40". hook: a SetCompletionHook on the model's output layer; each call sets
    its mode. device: of the model's inputs, by default the model's own. output_type: dict (in id order), df (a pandas
    frame, most likely first) or labels (names with a probability of at least 0.5). Raises UserError for another
    output_type, and UnknownName, a KeyError too.
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
            raise UnknownName(f"not in the vocabulary: {', '.join(unknown)}")
        if hook is not None:
            hook.set_mode(bypass=bypass, no_change=no_change)
        target = next((p.device for p in model.parameters()), None) if device is None else device
        ids = torch.tensor([[vocab[name] for name in tokens]], dtype=torch.long, device=target)
        weapon = torch.tensor([[weapon_vocab[weapon_id]]], device=target)
        model.eval()
        logits = model(ids, weapon, key_padding_mask=ids == vocab[pad_token])
        return _as(output_type, dict(zip(names, logits[0].sigmoid().tolist(), strict=True)))

    return predict


def _as(output_type: str, probabilities: dict[str, float]) -> Any:
    if output_type == "dict":
        return probabilities
    if output_type == "labels":
        return [name for name, p in probabilities.items() if p >= 0.5]
    import pandas as pd

    frame = pd.DataFrame({"ability": list(probabilities), "probability": list(probabilities.values())})
    return frame.sort_values("probability", ascending=False, ignore_index=True)
