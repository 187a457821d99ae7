"""Every name of the originals has their interface: parameters by place, defaults, methods, properties, attributes."""

import contextlib
import functools
import pathlib
import re
import tempfile
import types
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the originals' names are torch objects")

from jaxtrain.systems import criteria_evidence as psy  # noqa: E402
from jaxtrain.systems import fmri_autoencoder as giblet  # noqa: E402
from jaxtrain.systems import hjepa  # noqa: E402
from jaxtrain.systems import memory_lm as memory  # noqa: E402
from jaxtrain.systems import set_completion as splatnlp  # noqa: E402
from tests.contract import originals  # noqa: E402


def folder() -> pathlib.Path:
    return pathlib.Path(tempfile.mkdtemp())


def on_meta(build: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return build()


FIRST = originals.importlib.import_module("jaxtrain.systems.fmri_autoencoder.original.first_generation")
VIT = {"patch_size": 8, "embed_dim": 8, "depth": 1, "num_heads": 2}
SMALL = {"encoder_type": "vit_tiny_patch16_224", "img_size": 16, "vit": VIT}


def fmri() -> dict[str, Callable[[], Any]]:
    from tests.unit.fmri_autoencoder.test_facade_datasets import HEAD, write_cache
    from tests.unit.fmri_autoencoder.test_facade_trainer import make

    second = originals.SECOND
    names = ("CombinedAutoEncoderLoss", "FMRIMatchingLoss", "ReconstructionLoss", "TextEncoder")
    found = {name: getattr(FIRST, name) for name in names}
    found |= {name + second: getattr(giblet, name) for name in names}
    found |= {
        name: getattr(giblet, name) for name in ("NormalizedCombinedAutoEncoderLoss", "NormalizedFMRIMatchingLoss")
    }
    found |= {"NormalizedReconstructionLoss": giblet.NormalizedReconstructionLoss}
    found |= {name: functools.partial(on_meta, getattr(FIRST, name)) for name in ("AudioEncoder", "VideoEncoder")}
    found |= {
        name + second: functools.partial(on_meta, getattr(giblet, name))
        for name in ("AudioEncoder", "VideoEncoder", "MultimodalDecoder")
    }
    for name in ("VideoProcessor", "AudioProcessor", "TextProcessor", "FMRIProcessor"):
        found |= {name: getattr(FIRST, name), name + second: getattr(giblet, name)}
    for name in ("SherlockAutoencoder", "SherlockEncoder", "MultimodalAutoencoder", "MultimodalEncoder"):
        found[name] = functools.partial(on_meta, getattr(giblet, name))
    found["MultimodalDecoder"] = lambda: on_meta(lambda: FIRST.MultimodalDecoder(8))
    found |= {name: lambda: make(folder()) for name in ("Trainer", "Trainer" + second)}

    def dataset(kind: type, **options: Any) -> Any:
        place = folder()
        write_cache(place / "cache", **options)
        return kind(place, subjects=[1, 3])

    found["SherlockDataset"] = lambda: dataset(giblet.SherlockDataset)
    found["MultimodalDataset"] = lambda: dataset(giblet.MultimodalDataset, suffix=HEAD, video=72, audio=24)
    return found


def sets() -> dict[str, Callable[[], Any]]:
    block = {"embed_dim": 8, "num_heads": 2, "use_layer_norm": True}
    return {
        "ActivationBuffer": lambda: splatnlp.ActivationBuffer(4, 2),
        "EarlyStopping": splatnlp.EarlyStopping,
        "InducedSetAttentionBlock": lambda: splatnlp.InducedSetAttentionBlock(num_inducing_points=3, **block),
        "MultiheadAttentionBlock": lambda: splatnlp.MultiheadAttentionBlock(**block),
        "PoolingMultiheadAttention": lambda: splatnlp.PoolingMultiheadAttention(num_seeds=2, **block),
        "SelfAttentionBlock": lambda: splatnlp.SelfAttentionBlock(**block),
        "SetCompletionHook": lambda: splatnlp.SetCompletionHook(splatnlp.SparseAutoencoder(4)),
        "SetCompletionModel": lambda: splatnlp.SetCompletionModel(9, 3, 4, 8, 9, 1, 2, 3),
        "SetDataset": lambda: splatnlp.SetDataset([{"ability_tags": [1, 2], "weapon_id": 0}], 4),
        "SetTransformer": lambda: splatnlp.SetTransformer(4, 2, 8, 2, 3),
        "SetTransformerLayer": lambda: splatnlp.SetTransformerLayer(8, 2, 3),
        "SparseAutoencoder": lambda: splatnlp.SparseAutoencoder(4),
    }


def images() -> dict[str, Callable[[], Any]]:
    from tests.unit.hjepa.test_facade_trainer import tiny

    model = lambda: hjepa.HJEPA(**SMALL, embed_dim=8, predictor_depth=1, predictor_num_heads=2, num_hierarchies=2)
    schedule = lambda kind: kind(1.0, 0.0, 2, 3)
    found = {
        name: getattr(hjepa, name)
        for name in (
            "AdaptiveVICRegLoss", "CombinedLoss", "EarlyStopping", "EppsPulleyTest", "HJEPALoss",
            "HierarchicalCombinedLoss", "HierarchicalMaskGenerator", "HybridVICRegSIGRegLoss", "JEPAEvalTransform",
            "JEPATransform", "MultiBlockMaskGenerator", "MultiCropMaskGenerator", "NTXentLoss", "SIGRegLoss",
            "VICRegLoss",
        )
    }  # fmt: skip
    found |= data_sets()
    pair = lambda kind: kind([[1, 2], [3]])
    many = {
        name: functools.partial(pair, getattr(hjepa, name)) for name in ("BalancedMultiDataset", "WeightedMultiDataset")
    }
    batches = ("CutMix", "DeiTIIIAugmentation", "DeiTIIIEvalTransform", "Mixup", "MixupCutmix")
    found |= {name: getattr(hjepa, name) for name in (*batches, "RandAugment", "RandomErasing")}
    crops = ("AdaptiveMultiCropTransform", "MultiCropEvalTransform", "MultiCropTransform")
    found |= many | {name: getattr(hjepa, name) for name in crops}
    found["MultiCropDataset"] = lambda: hjepa.MultiCropDataset(
        types.SimpleNamespace(classes=[]), hjepa.MultiCropTransform()
    )
    return found | {
        "ActionPredictor": lambda: hjepa.ActionPredictor(8, 2, 1, 2),
        "AdaLNZeroBlock": lambda: hjepa.AdaLNZeroBlock(8, 2, 4),
        "PredictorBlock": lambda: hjepa.PredictorBlock(8, 2),
        "RoPEAttentionWrapper": lambda: hjepa.RoPEAttentionWrapper(
            hjepa.ContextEncoder(**SMALL).vit.blocks[0].attn, hjepa.VisionRoPE2D(4)
        ),
        "CEMPlanner": lambda: hjepa.CEMPlanner(None, None, 2),
        "CheckpointManager": lambda: hjepa.CheckpointManager(folder()),
        "ContextEncoder": lambda: hjepa.ContextEncoder(**SMALL),
        "TargetEncoder": lambda: hjepa.TargetEncoder(**SMALL),
        "ContrastiveJEPALoss": lambda: hjepa.ContrastiveJEPALoss(hjepa.HJEPALoss()),
        "HJEPASIGRegLoss": lambda: hjepa.HJEPASIGRegLoss(hjepa.HJEPALoss(), hjepa.SIGRegLoss(4)),
        "CosineScheduler": lambda: schedule(hjepa.CosineScheduler),
        "LinearScheduler": lambda: schedule(hjepa.LinearScheduler),
        "BatchNorm1dForTokens": lambda: hjepa.BatchNorm1dForTokens(4),
        "DropPath": hjepa.DropPath,
        "LayerScale": lambda: hjepa.LayerScale(4),
        "EMAScheduler": lambda: schedule(hjepa.EMAScheduler),
        "FeatureQualityAnalyzer": lambda: hjepa.FeatureQualityAnalyzer(model()),
        "FewShotEvaluator": lambda: hjepa.FewShotEvaluator(model(), 2),
        "FineTuneEvaluator": lambda: hjepa.FineTuneEvaluator(model(), 2),
        "KNNEvaluator": lambda: hjepa.KNNEvaluator(model()),
        "LinearProbeEvaluator": lambda: hjepa.LinearProbeEvaluator(model(), 2, 8),
        "TransferHead": lambda: hjepa.TransferHead(8, 2),
        "HierarchicalScheduler": lambda: hjepa.HierarchicalScheduler([]),
        "FrameEncoder": lambda: hjepa.FrameEncoder(**SMALL, embed_dim=8),
        "HJEPA": model,
        "HJEPATrainer": lambda: tiny(folder(), compiled=False),
        "LeWM": lambda: hjepa.create_lewm(**SMALL, embed_dim=8, predictor_depth=1, predictor_num_heads=2),
        "LinearProbe": lambda: hjepa.LinearProbe(8, 2),
        "MetricsLogger": lambda: hjepa.MetricsLogger("x", folder(), use_wandb=False),
        "OptimizedHJEPA": lambda: hjepa.OptimizedHJEPA(model()),
        "Predictor": lambda: hjepa.Predictor(8, 1, 2),
        "ProgressTracker": lambda: hjepa.ProgressTracker(2, 3),
        "VisionRoPE2D": lambda: hjepa.VisionRoPE2D(8),
    }


def data_sets() -> dict[str, Callable[[], Any]]:
    from PIL import Image

    from tests.unit.hjepa.test_facade_images import cifar10, cifar100

    def made(kind: Callable, write: Callable) -> Any:
        place = folder()
        write(place)
        return kind(place)

    def pictures(place: pathlib.Path) -> None:
        (place / "train/a").mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(place / "train/a/0.png")

    def stl(place: pathlib.Path) -> None:
        (place / "stl10_binary").mkdir()
        (place / "stl10_binary/train_X.bin").write_bytes(bytes(3 * 96 * 96))

    episode = lambda place: torch.save(
        {"frames": torch.zeros(2, 3, 4, 4), "actions": torch.zeros(2, 1)}, place / "0.pt"
    )
    return {
        "CIFAR10Dataset": lambda: made(hjepa.CIFAR10Dataset, cifar10),
        "CIFAR100Dataset": lambda: made(hjepa.CIFAR100Dataset, cifar100),
        "EpisodeFileSequentialDataset": lambda: made(lambda p: hjepa.EpisodeFileSequentialDataset(p, 2), episode),
        "ImageNetDataset": lambda: made(hjepa.ImageNetDataset, pictures),
        "MultiCropDatasetRaw": lambda: made(lambda place: hjepa.MultiCropDatasetRaw("imagenet", place), pictures),
        "STL10Dataset": lambda: made(hjepa.STL10Dataset, stl),
        "SyntheticSequentialDataset": lambda: hjepa.SyntheticSequentialDataset(1, 2),
    }


def texts() -> dict[str, Callable[[], Any]]:
    import pandas

    from tests.unit.criteria_evidence import test_facade_training as training
    from tests.unit.criteria_evidence.facade import folder_of

    class Words:
        """A tokenizer of many texts at once."""

        def __call__(self, texts, **options):
            ids = torch.ones(len(texts), options["max_length"], dtype=torch.long)
            return {"input_ids": ids, "attention_mask": ids}

    encoder = lambda: psy.TransformerEncoder(folder_of(folder()))
    kinds = {
        "CriteriaDataset": "criteria",
        "EvidenceDataset": "evidence",
        "ShareDataset": "share",
        "JointDataset": "joint",
    }
    found = {name: functools.partial(training.dataset_of, f"proj_{kind}") for name, kind in kinds.items()}
    frame = pandas.DataFrame({"text": ["so tired"], "label": [1]})
    return found | {
        "ClassificationDataset": lambda: psy.ClassificationDataset(frame, Words(), 4, "text"),
        "CriteriaModel": lambda: psy.CriteriaModel(encoder(), 2),
        "EvidenceModel": lambda: psy.EvidenceModel(encoder(), 2),
        "DSMCriteriaLoader": lambda: psy.DSMCriteriaLoader(__file__),
        "GroundTruthValidator": lambda: psy.GroundTruthValidator({}, {"a"}),
        "OptunaRunner": lambda: psy.OptunaRunner("x"),
        "Model": lambda: psy.Model(str(folder_of(folder()))),
        "ReDSM5DataLoader": lambda: psy.ReDSM5DataLoader({}, data_dir=folder()),
        "Evaluator": lambda: psy.Evaluator(torch.nn.Linear(2, 2), "cpu"),
        "Trainer": lambda: training.small_trainer(folder()),
        "TransformerEncoder": encoder,
    }


def words() -> dict[str, Callable[[], Any]]:
    from tests.unit.memory_lm.test_facade_models import built
    from tests.unit.memory_lm.test_facade_training import tiny, with_tokenizer

    def adapter() -> Any:
        from tests.e2e.originals import memory as snippets

        with contextlib.chdir(folder()):
            snippets.plant({})
            return memory.MemoryAdapter(memory.load_config("configs/adapter_qwen2.5_1.5b.yaml"))

    def trainer() -> Any:
        place = folder()
        return memory.Trainer(with_tokenizer(tiny(place), place))

    def rows() -> Any:
        made = trainer()
        return memory.TextDataset(made.config.training.dataset_name, made.tokenizer, 16)

    bank = lambda: memory.MemoryBank(6, 4)
    return {
        "ChapterRouter": lambda: memory.ChapterRouter(8, 4),
        "ChapteredMemoryBank": lambda: memory.ChapteredMemoryBank(bank(), 2),
        "FactorizedMemoryBank": lambda: memory.FactorizedMemoryBank(6, 4, 2),
        "LoRALinear": lambda: memory.LoRALinear(4, 4),
        "MemoryBank": bank,
        "MemoryCrossAttention": lambda: memory.MemoryCrossAttention(8, 2),
        "MemoryTransformer": lambda: built("scratch_moc_seq_shared")[0],
        "QuantizedMemoryBank": lambda: memory.QuantizedMemoryBank(6, 4),
        "ReducedDimMemoryBank": lambda: memory.ReducedDimMemoryBank(6, 4),
        "MemoryAdapter": adapter,
        "TextDataset": rows,
        "Trainer": trainer,
    }


GROUPS = {
    "fmri_autoencoder": fmri,
    "set_completion": sets,
    "hjepa": images,
    "criteria_evidence": texts,
    "memory_lm": words,
}


@functools.cache
def instances() -> dict[tuple[str, str], Callable[[], Any]]:
    return {(system, name): build for system, group in GROUPS.items() for name, build in group().items()}


@pytest.mark.parametrize(("system", "key"), originals.names())
def test_a_name_has_the_originals_interface(system, key):
    assert originals.faults(system, key, instances().get((system, key))) == []


def test_every_class_with_attributes_is_made():
    entries = [(system, key) for system, key in originals.names() if originals.offered(system, key) is not None]
    lacking = [key for system, key in entries if originals.TABLE[system][key].get("attributes")]
    made = [key for _, key in instances()]
    assert sorted(set(lacking) - set(made)) == []


def test_what_a_page_lists_as_absent_is_absent():
    for system, table in originals.TABLE.items():
        present = []
        for name in originals.out_of(system):
            owner, _, member = name.partition(".")
            facade = originals.offered(system, owner) if owner in table else None
            if facade is not None and (not member or hasattr(facade, member)):
                present.append(name)
        assert present == []


def test_no_page_calls_a_name_equal_that_lacks_a_member():
    wrong = []
    for system, page in originals.PAGES.items():
        owners = {name.partition(".")[0] for name in originals.out_of(system) if "." in name}
        for line in (originals.ROOT / f"docs/originals/{page}.md").read_text().splitlines():
            first, _, rest = line.removeprefix("| ").partition(" | ")
            named = set(re.findall(r"`(\w+)", first))
            if line.startswith("| `") and re.search(r"\bequal\b", rest) and named & owners:
                wrong.append(line[:80])
    assert wrong == []


def test_what_is_not_the_originals_is_named():
    two = lambda a, b, c=1: None
    assert originals.parameters("f()", ["a", "b", "c=1"], two, 0) == []
    assert originals.parameters("f()", ["a", "c=1"], two, 0) == [
        "f(): takes ['a', 'b', 'c'] by place, wanted ['a', 'c']"
    ]
    assert originals.parameters("f()", ["a", "b", "c=2"], two, 0) == ["f(): c is 1 by default, wanted 2"]
    assert originals.parameters("f()", ["a", "b", "c=1", "*", "d=2"], two, 0) == ["f(): no parameter d"]
