"""How much of a text config's rows is padding, packed and with one document per row: `python -m benchmarks.packing`.

python -m benchmarks.packing [--config configs/memory_lm_tiny.yaml] [data.max_length=512 ...]
"""

import json

from benchmarks import parser
from jaxtrain import config_io
from jaxtrain.systems.memory_lm.data import build_data
from jaxtrain.systems.memory_lm.packing import padding_ratio


def measure(config_file: str, packing: bool, overrides: list[str]) -> dict[str, float]:
    """Rows, tokens and padding of the training split."""
    config = config_io.load(config_file, [*overrides, f"data.packing={str(packing).lower()}"])[1]
    columns = build_data(config, "train").columns
    rows, length = columns["input_ids"].shape
    padding = padding_ratio(columns)
    return {"rows": rows, "tokens": round(rows * length * (1 - padding)), "padding_ratio": round(padding, 5)}


def main() -> None:
    p = parser(__doc__, figures=False)
    p.add_argument("--config", default="configs/memory_lm_tiny.yaml")
    p.add_argument("overrides", nargs="*", metavar="a.b=c")
    arguments = p.parse_intermixed_args()
    kinds = {"packed": True, "one document per row": False}
    print(json.dumps({k: measure(arguments.config, v, arguments.overrides) for k, v in kinds.items()}, indent=1))


if __name__ == "__main__":
    main()
