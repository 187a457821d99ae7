"""The original's datasets of episodes, its neighbours and its small functions."""

import logging
import random

import numpy as np
import pytest
import torch

from jaxtrain.systems import hjepa


def episodes(folder, *lengths: int) -> None:
    for number, length in enumerate(lengths):
        steps = torch.arange(length, dtype=torch.float32)
        frames = steps[:, None, None, None].expand(length, 3, 2, 2).clone()
        torch.save({"frames": frames, "actions": steps[:, None].clone()}, folder / f"{number}.pt")


def test_every_window_of_long_enough_episodes_comes_in_order(tmp_path):
    episodes(tmp_path, 5, 2, 3)
    data = hjepa.EpisodeFileSequentialDataset(tmp_path, 3, random_window=False)
    assert [path.name for path in data.episode_files] == ["0.pt", "2.pt"]
    assert [data[i]["actions"][:, 0].tolist() for i in range(len(data))] == [[0, 1, 2], [1, 2, 3], [2, 3, 4], [0, 1, 2]]
    drawn = hjepa.EpisodeFileSequentialDataset(tmp_path, 3, lambda frames: 2 * frames)
    random.seed(0)
    starts = {int(drawn[0]["actions"][0]) for _ in range(40)}
    assert (len(drawn), starts) == (2, {0, 1, 2})
    assert torch.equal(drawn[1]["frames"][:, 0, 0, 0], torch.tensor([0.0, 2.0, 4.0]))
    with pytest.raises(ValueError, match="no .pt file of 9 steps"):
        hjepa.EpisodeFileSequentialDataset(tmp_path, 9)
    with pytest.raises(FileNotFoundError):
        hjepa.EpisodeFileSequentialDataset(tmp_path / "none", 3)


def test_synthetic_episodes_follow_their_seed():
    data = hjepa.SyntheticSequentialDataset(4, 3, image_size=8, seed=7)
    generator = torch.Generator().manual_seed(7 + 2)
    assert torch.equal(data[2]["frames"], torch.rand((3, 3, 8, 8), generator=generator))
    assert torch.equal(data[2]["actions"], 2 * torch.rand((3, 4), generator=generator) - 1)
    batch = next(iter(hjepa.build_sequential_dataloader(data, 2)))
    assert (batch["frames"].shape, batch["actions"].shape) == ((2, 3, 3, 8, 8), (2, 3, 4))
    assert len(hjepa.build_dataloader(data, 3, 0)) == 1


def test_neighbours_vote_on_the_features_of_a_loader():
    class Model(torch.nn.Module):
        def extract_features(self, images, level=0):
            return images[:, None]

    rows = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0], [0.1, 0.9]])
    labels = torch.tensor([0, 0, 1, 1])
    loader = [(rows, labels)]
    evaluator = hjepa.KNNEvaluator(Model(), k=2)
    with pytest.raises(ValueError, match="build_knn_index"):
        evaluator.evaluate(loader, 2)
    evaluator.build_knn_index(loader)
    assert evaluator.evaluate(loader, 2, verbose=False)["accuracy"] == 100
    assert evaluator.evaluate_multiple_k(loader, 2, [1, 4, 9], verbose=False).keys() == {1, 4}
    predicted, votes = evaluator.predict(rows.numpy(), 3)
    assert predicted.tolist() == labels.tolist()
    np.testing.assert_allclose(votes.sum(1), 1)
    assert votes.shape == (4, 3)
    assert hjepa.knn_eval(Model(), loader, loader, 2, k=1, verbose=False)["accuracy"] == 100


def test_layers_do_what_their_names_say():
    x = torch.randn(200, 3, 4)
    dropped = hjepa.DropPath(0.5)(x)
    assert set(dropped.abs().sum((1, 2)).eq(0).tolist()) == {True, False}
    torch.testing.assert_close(dropped[dropped.abs().sum((1, 2)) > 0][0], 2 * x[dropped.abs().sum((1, 2)) > 0][0])
    assert torch.equal(hjepa.DropPath(0.5).eval()(x), x)
    torch.testing.assert_close(hjepa.LayerScale(4, 0.5)(x), 0.5 * x)
    normed = hjepa.BatchNorm1dForTokens(4)(x)
    torch.testing.assert_close(normed.reshape(-1, 4).mean(0), torch.zeros(4), atol=1e-5, rtol=0)


def test_a_saved_file_loads_and_logging_writes(tmp_path):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    hjepa.save_checkpoint(tmp_path / "a" / "x.pth", model, optimizer, 3, note="n")
    other = torch.nn.Linear(2, 1)
    found = hjepa.load_checkpoint(tmp_path / "a" / "x.pth", other)
    assert (found["epoch"], found["note"]) == (3, "n")
    assert torch.equal(other.weight, model.weight)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        hjepa.setup_logging(tmp_path / "log" / "run.log")
        logging.getLogger("x").info("a line")
        assert "a line" in (tmp_path / "log" / "run.log").read_text()
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
    usage = hjepa.get_disk_usage(tmp_path / "none")
    assert usage["total"] >= usage["free"] > 0
    assert hjepa.check_disk_space(tmp_path, 0.0, 0.0)
    assert not hjepa.check_disk_space(tmp_path, 1e9)
