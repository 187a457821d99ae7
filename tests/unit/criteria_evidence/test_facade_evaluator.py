"""The original's Evaluator gives classes and probabilities of a loader's rows."""

import numpy as np
import pytest
import torch

from jaxtrain.systems import criteria_evidence as psy


class Logits(torch.nn.Module):
    def forward(self, input_ids, attention_mask):
        return torch.stack([input_ids[:, 0].float(), torch.full((len(input_ids),), 2.0)], 1)


def test_probabilities_are_the_softmax_and_classes_the_largest():
    ids = torch.tensor([[0], [5], [3]])
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(2)]
    evaluator = psy.Evaluator(Logits().train(), "cpu", "evidence")
    assert (evaluator.task_type, evaluator.criterion) == ("evidence", None)
    shares = evaluator.predict_proba(batches)
    np.testing.assert_allclose(shares, torch.tensor([[0.0, 2], [5, 2], [3, 2]]).softmax(1), rtol=1e-6)
    assert evaluator.predict(batches).tolist() == [1, 0, 0]
    assert not evaluator.model.training
    with pytest.raises(ValueError, match="gave no batch"):
        evaluator.predict([])
