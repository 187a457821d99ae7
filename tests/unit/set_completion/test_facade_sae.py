"""The original's training and evaluation of an autoencoder on a model's pooled vectors, as its users call them."""

import numpy as np
import pytest
import torch

from jaxtrain.systems import set_completion as splatnlp
from jaxtrain.systems.set_completion.original import sae_training
from tests.unit.set_completion.golden import FOLDER, table
from torch_bridge import files


def recorded(name: str):
    tensors = files.load(FOLDER / f"{name}.safetensors")
    return table(name), lambda key: torch.from_numpy(np.array(tensors[key])), tensors


def parts(case, tensor, tensors):
    """The frozen model and the autoencoder of a recorded case."""
    primary = splatnlp.SetCompletionModel(**case["primary_config"])
    primary.load_state_dict({key: tensor(f"param/primary.{key}") for key in primary.state_dict()}, strict=True)
    sae = splatnlp.SparseAutoencoder(**{"input_dim": case["primary_config"]["hidden_dim"], **case["sae_config"]})
    sae.load_state_dict({key: tensor(f"param/sae.{key}") for key in sae.state_dict()}, strict=True)
    return primary, sae


def batches(split: str, count: int, tensor):
    names = ("ability_tokens", "weapon_token", "targets")
    return [tuple(tensor(f"in/{split}{i}.{name}") for name in names) for i in range(count)]


def vocab_of(primary) -> dict[str, int]:
    return {"<PAD>": primary.pad_token_id}


@pytest.mark.parametrize("name", ["sae_loop", "sae_loop_ring_bug"])
def test_a_run_gives_the_originals_history_and_weights(name, monkeypatch):
    case, tensor, tensors = recorded(name)
    primary, sae = parts(case, tensor, tensors)
    loop = dict(case["loop"])
    rows = iter(tensor("in/sae_batches_concat").split(tensor("in/sae_batch_sizes").tolist()))
    monkeypatch.setattr(sae_training, "_drawn", lambda buffer, size, count: [next(rows) for _ in range(count)])
    drawn = iter([tensor(key) for key in sorted(tensors) if key.startswith("in/resample") and key.endswith(".idx")])
    monkeypatch.setattr(torch, "multinomial", lambda *given, **options: next(drawn))
    optimizer = torch.optim.AdamW(sae.parameters(), lr=loop["lr"])
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, case["T_max"], case["eta_min"])
    numbers = ("epochs", "buffer_size", "sae_batch", "steps_before_train", "sae_train_steps")
    numbers += ("resample_steps", "resample_weight", "resample_bias", "kl_warmup_steps", "kl_period_steps", "kl_floor")
    numbers += ("l1_warmup_steps", "l1_start")
    history, trained = splatnlp.train_sae_model(
        primary,
        sae,
        optimizer,
        scheduler,
        splatnlp.setup_hook(primary),
        splatnlp.SAEConfig(**{"input_dim": sae.input_dim, **case["sae_config"]}),
        batches("train", loop["n_train_batches"], tensor),
        batches("val", 2, tensor),
        vocab_of(primary),
        "cpu",
        *(loop[name] for name in numbers),
        gradient_clip_val=loop["gradient_clip_val"],
        verbose=False,
        exact_fill_bug=True,
    )
    assert trained is sae
    wanted = case["metrics_history"]
    assert [set(entry) for entry in history] == [set(entry) for entry in wanted]
    for got, want in zip(history, wanted, strict=True):
        step_distance = (
            {"miracle_distance"} if "total" in want else set()
        )  # there of an mse of 0, which it looks up wrongly
        for key in set(want) - step_distance:
            assert got[key] == pytest.approx(want[key], rel=2e-5, abs=1e-6), key
    for key, value in sae.state_dict().items():
        torch.testing.assert_close(value, tensor(f"afterN/sae.{key}"), atol=1e-6, rtol=1e-5)


def test_evaluations_are_the_originals():
    case, tensor, tensors = recorded("sae_eval_hooks")
    primary, sae = parts(case, tensor, tensors)
    given = batches("b", 3, tensor)
    hook, config = splatnlp.setup_hook(primary), splatnlp.SAEConfig(input_dim=sae.input_dim)
    arguments = (primary, sae, hook, given, "cpu", config, vocab_of(primary))
    found = splatnlp.evaluate_sae_model(*arguments, description="Test")
    assert found == pytest.approx(case["evaluate_sae_model(description='Test', dead_neuron_threshold=1e-6)"], rel=1e-5)
    found = splatnlp.evaluate_reconstruction_impact(*arguments)
    assert found == pytest.approx(case["evaluate_reconstruction_impact"], rel=1e-5)
    assert primary.training
    hook.remove()
    assert not primary.output_layer._forward_pre_hooks


def test_a_hook_keeps_what_went_through_and_is_taken_out_again():
    torch.manual_seed(0)
    model = splatnlp.SetCompletionModel(12, 3, 8, 16, 12, num_layers=2, num_heads=2, num_inducing_points=3)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 11]])
    pooled, tokenwise = splatnlp.setup_hook(model), splatnlp.setup_hook(model, 0, 0, target="token_ff")
    logits = model(tokens, torch.tensor([[0], [1]]))
    torch.testing.assert_close(model.output_layer(pooled.activation), logits)
    assert tokenwise.activation.shape == (2, 3, 64)
    pooled.remove()
    pooled.activation = None
    model(tokens, torch.tensor([[0], [1]]))
    assert pooled.activation is None
    with pytest.raises(ValueError, match="wanted one of masked_mean, token_ff"):
        splatnlp.setup_hook(model, target="logits")
