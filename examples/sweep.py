"""Train 16 small classifiers at once, show them ranked, and load the best one's weights into torch.

Run it from the repository's root: python examples/sweep.py
"""

import torch
from sklearn.datasets import load_digits

import jaxtrain


def make_module(dropout=0.1):
    return torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(dropout), torch.nn.Linear(32, 10)
    )


def main():
    images, labels = load_digits(return_X_y=True)
    images, labels = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels)
    train = torch.utils.data.TensorDataset(images[:1280], labels[:1280])
    validation = torch.utils.data.TensorDataset(images[1280:], labels[1280:])
    result = jaxtrain.sweep(
        make_module,
        train,
        torch.nn.CrossEntropyLoss,
        {
            "seed": range(4),
            "lr": {"type": "loguniform", "low": 1e-3, "high": 3e-2},
            "dropout": {"type": "uniform", "low": 0.05, "high": 0.5},
            "loss.label_smoothing": {"type": "uniform", "low": 0.01, "high": 0.2},
        },
        runs=16,
        validation=validation,
        config={
            "train": {"epochs": 4, "steps_per_call": 20},
            "evaluation": {"metric": "accuracy", "mode": "max"},
        },
        pruner="asha",
    )
    print(result.table())
    module = make_module()
    module.load_state_dict(result.state_dict())
    accuracy = (module.eval()(images[1280:]).argmax(1) == labels[1280:]).float().mean()
    print(f"{len(result.runs)} runs, {result.programs} programs; the best one in torch: {accuracy:.3f}")
    return result


if __name__ == "__main__":
    main()
