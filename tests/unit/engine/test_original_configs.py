"""YAML files of the torch originals are configs: recognised by their keys, translated, nothing dropped in silence."""

import contextlib
import dataclasses

import pytest
from omegaconf import OmegaConf

from jaxtrain import config_io, original_configs, run
from jaxtrain.errors import UserError

CASES = {
    "sherlock": (
        {"learning_rate": 3e-4, "fmri_weight": 2.0, "gradient_clip_val": 0.5, "data": {"frame_skip": 4, "fps": 25.0}},
        {"task": "fmri_autoencoder.head", "optim.lr": 3e-4, "loss.fmri_weight": 2.0, "optim.clip_norm": 0.5}
        | {"model.video_frames_per_tr": 10, "data.frame_skip": 4, "optim.schedule.warmup_epochs": 5},
    ),
    "hjepa": (
        {"model": {"ema": {"momentum": 0.99, "momentum_warmup_epochs": 30}}, "training": {"epochs": 300}}
        | {"data": {"batch_size": 8}, "checkpoint": {"keep_best_n": 5}},
        {"task": "hjepa.pretrain", "model.ema.ramp_ratio": 0.1, "checkpoint.keep_best": 5, "data.batch_size": 8},
    ),
    "psy": (
        {"project": "evidence", "training": {"train_batch_size": 8, "gradient_accumulation": 2}}
        | {"amp": {"enabled": False}, "scheduler": {"type": "linear", "warmup_ratio": 0.1}},
        {"task": "criteria_evidence.evidence", "data.batch_size": 16, "train.accumulate_steps": 2}
        | {"precision.policy": "fp32", "optim.schedule.name": "linear", "evaluation.metric": "span_em"},
    ),
    "memory": (
        {"model": {"hidden_dim": 64, "num_heads": 4}, "training": {"memory_lr": 2e-4, "batch_size": 2, "num_gpus": 4}},
        {"task": "memory_lm.scratch", "model.hidden_dim": 64, "optim.groups.memory.lr": 2e-4, "data.batch_size": 32},
    ),
}


@pytest.fixture
def write(tmp_path):
    def write(values):
        path = tmp_path / "original.yaml"
        path.write_text(OmegaConf.to_yaml(OmegaConf.create(values)))
        return path

    return write


@pytest.mark.parametrize("name", CASES)
def test_an_originals_file_becomes_the_settings_that_do_the_same(name, write):
    values, wanted = CASES[name]
    task, config = config_io.load(write(values))
    flat = config_io.flatten(config.model_dump(mode="json"))
    assert {key: flat[key] for key in wanted} == wanted
    assert task.original.name.startswith(name)


def test_what_nothing_reads_is_named_and_the_printed_config_loads(write, tmp_path, capsys):
    path = write({"learning_rate": 1e-3, "fmri_weight": 1.0, "pin_memory": True, "fish": 1, "sea": {"shark": [2]}})
    assert run.main(["--config", str(path), "--print-config", "optim.lr=0.5"]) == 0
    printed = capsys.readouterr().out
    assert "# fish: not translated" in printed
    assert "# sea.shark: not translated" in printed
    assert "# pin_memory: needs no counterpart" in printed
    (tmp_path / "new.yaml").write_text(printed)
    assert config_io.load(tmp_path / "new.yaml")[1].optim.lr == 0.5


def test_keys_of_two_originals_need_the_task(write):
    path = write({"training": {"gradient_checkpointing": True}})
    with pytest.raises(UserError, match=r"could be of .*task=criteria_evidence.criteria.*task=memory_lm.scratch"):
        config_io.load(path)
    assert config_io.load(path, ["task=criteria_evidence.share"])[1].task == "criteria_evidence.share"
    assert config_io.load(path, ["task=memory_lm.scratch"])[1].train.remat == "full"


@pytest.mark.parametrize(
    "values", [{"optim": {"lr": 1e-3}, "data": {"batch_size": 4}}, {"one": 1, "two": 2, "seed": 3}]
)
def test_a_config_that_only_forgot_its_task_is_no_original(values, write):
    with pytest.raises(UserError, match="`task` is missing"):
        config_io.load(write(values))


def test_a_wrong_value_of_an_original_is_one_clear_error(write):
    with pytest.raises(UserError, match="scheduler_type is 'cosin', wanted one of cosine, step, none"):
        config_io.load(write({"learning_rate": 1e-3, "scheduler_type": "cosin"}))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"model": {"ema": 3}, "training": {"betas": [0.9, 0.95], "epochs": 3}}, "model.ema: got 3, wanted a section"),
        (
            {"training": {"betas": -1, "lr_schedule": "cosine"}, "masking": {"num_masks": 4}},
            "training.betas: -1 cannot",
        ),
        (
            {"memory": {"num_memory_tokens": "many"}, "training": {"memory_lr": 1e-4}},
            "num_memory_tokens: 'many' cannot",
        ),
        ({"learning_rate": "fast", "fmri_weight": 1.0}, "learning_rate: 'fast' cannot be used here"),
    ],
)
def test_a_value_of_another_kind_is_named_by_its_key(values, words, write):
    with pytest.raises(UserError, match=words):
        config_io.load(write(values))


def test_no_value_of_any_kind_ends_in_a_traceback():
    by_name = {name.split(" ")[0]: original for name, (original, _) in original_configs.originals().items()}
    for name, (values, _) in CASES.items():
        for key, _ in original_configs.leaves(values):
            for wrong in ("abc", None, -1, [], {"x": 1}, 0, True, [1, 2, 3], 1.5):
                changed = OmegaConf.create(values)
                OmegaConf.update(changed, key, wrong, merge=False)
                with contextlib.suppress(UserError):
                    original_configs.translate(by_name[name], OmegaConf.to_container(changed))


def test_a_key_that_is_nearly_one_of_the_originals_is_asked_about(write, capsys):
    path = write({"training": {"warmup_epoch": 3, "lr_schedule": "cosine", "betas": [0.9, 0.95]}, "masking": {}})
    assert run.main(["--config", str(path), "--print-config"]) == 0
    wanted = "# training.warmup_epoch: not translated, nothing here reads it; did you mean training.warmup_epochs?"
    assert wanted in capsys.readouterr().out


def test_a_system_from_outside_takes_the_yaml_of_its_own_original(write, tmp_path, monkeypatch):
    (tmp_path / "my_project.py").write_text(
        "import dataclasses\n"
        "from jaxtrain.task import LegacyConfig, find_task\n"
        "convert = lambda values: {'task': 'my_project.train', 'optim': {'lr': values['rate']}}\n"
        "original = LegacyConfig(name='mine', keys=frozenset({'rate'}), convert=convert)\n"
        "TASKS = {'train': dataclasses.replace(find_task('digits.classify'), original=original)}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert config_io.load(write({"rate": 0.25}), ["task=my_project.train"])[1].optim.lr == 0.25


def test_an_evaluation_section_of_hjepa_is_no_setting_of_this_project(write):
    values, _ = CASES["hjepa"]
    path = write(values | {"evaluation": {"eval_frequency": 5, "linear_probe": {"enabled": True}}})
    assert config_io.load(path)[1].task == "hjepa.pretrain"
    lines = config_io.translated(path).lines()
    assert any(line.startswith("# evaluation.eval_frequency: needs no counterpart") for line in lines)


def test_overrides_in_the_originals_names_come_before_the_translation(write):
    values, _ = CASES["psy"]
    config = config_io.load(write(values), ["training.train_batch_size=4", "optim.lr=0.5"])[1]
    assert (config.data.batch_size, config.optim.lr) == (8, 0.5)


def test_hydras_signs_before_an_override_are_taken_without_hydra(write):
    values, _ = CASES["psy"]
    path = write({key: value for key, value in values.items() if key != "amp"} | {"mlflow": {"tracking_uri": "x.db"}})
    given = ["+training.use_amp=false", "++training.seed=7", "+optim.lr=0.5", "~mlflow"]
    config = config_io.load(path, given)[1]
    assert (config.precision.policy, config.seed, config.optim.lr) == ("fp32", 7, 0.5)
    assert config.tracking.mlflow_uri == "sqlite:///mlflow.db"
    with pytest.raises(UserError, match="override ~training.fish: there is no fish to remove"):
        config_io.load(path, ["~training.fish"])


def test_an_override_may_be_of_a_whole_section_of_the_original(write):
    path = write({"project": "criteria", "training": {"optimizer": {"name": "adamw"}, "scheduler": {"name": "linear"}}})
    given = ["training.scheduler=null", "training.optimizer={name: adam, weight_decay: 0.1}"]
    optim = config_io.load(path, given)[1].optim
    assert (optim.schedule.name, optim.name, optim.weight_decay) == ("constant", "adam", 0.1)


def test_a_key_of_the_original_is_not_asked_about_as_itself():
    original = next(one for name, (one, _) in original_configs.originals().items() if name.startswith("psy"))
    unread = dataclasses.replace(original, convert=lambda values: {"task": "criteria_evidence.criteria"})
    found = original_configs.translate(unread, {"model": {"gradient_checkpointing": True}})
    assert found.unknown == ["model.gradient_checkpointing"]
    assert found.meant.get("model.gradient_checkpointing") != "model.gradient_checkpointing"


@pytest.fixture
def composed(tmp_path):
    pytest.importorskip("hydra")
    groups = {
        "config": "defaults: [{model: roberta_base}, {training: default}, {task: criteria}, _self_]\n"
        "project: {name: psy}\nseed: 7\nmlflow: {experiment_name: '${project.name}-${task.type}-${now:%Y}'}\n"
        "paths: {outputs: outputs}\nhydra: {run: {dir: 'outputs/${now:%Y-%m-%d}'}}\n",
        "model/roberta_base": "{encoder_name: roberta-base, dropout: 0.1}",
        "model/bert_base": "{encoder_name: bert-base-uncased, dropout: 0.2}",
        "training/default": "{num_epochs: 10, batch_size: 32, early_stopping: {metric: val_f1_macro, mode: max}}",
        "task/criteria": "{type: binary_classification}",
        "task/evidence": "{type: multi_label_classification}",
    }
    for name, text in groups.items():
        path = tmp_path / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path / "config.yaml"


def test_hydras_groups_and_overrides_are_composed(composed):
    overrides = ["model=bert_base", "training.num_epochs=3", "optim.lr=1e-3", "task=criteria"]
    merged = config_io.merged(composed, overrides)
    assert merged["task"] == "criteria_evidence.criteria"
    assert (merged["seed"], merged["train"]["epochs"], merged["optim"]["lr"]) == (7, 3, 1e-3)
    assert merged["model"] == {"pretrained": "bert-base-uncased", "criteria": {"dropout": 0.2}}
    assert config_io.translated(composed, overrides).unknown == []


def test_the_group_task_chooses_the_task_and_its_metric(composed):
    translated = config_io.translated(composed, ["task=evidence"]).settings
    assert (translated["task"], translated["evaluation"]["metric"]) == ("criteria_evidence.evidence", "span_em")
    translated = config_io.translated(composed, ["task=joint"]).settings  # not among the group's options
    assert (translated["task"], translated["evaluation"]["metric"]) == ("criteria_evidence.joint", "joint_score")


@pytest.mark.parametrize("override", ["model=nonexistent", "+model=nonexistent"])
def test_an_option_that_a_group_lacks_is_refused_with_those_it_has(composed, override):
    with pytest.raises(UserError, match=r"has no nonexistent.yaml, wanted one of bert_base, roberta_base"):
        config_io.merged(composed, [override])


def test_hydras_working_directory_is_resolved(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values, _ = CASES["psy"]
    path = write(values | {"dataset": {"path": "${hydra:runtime.cwd}/rows.csv"}})
    assert config_io.load(path)[1].data.path == f"{tmp_path}/rows.csv"


def test_what_hydra_cannot_compose_is_one_sentence(composed):
    (composed.parent / "model/roberta_base.yaml").unlink()
    with pytest.raises(UserError, match="Hydra cannot compose it: .*model/roberta_base"):
        config_io.merged(composed)


def test_a_sweep_of_wandb_is_no_run(tmp_path):
    path = tmp_path / "sae-sweep.yaml"
    path.write_text("program: cli.py\nmethod: bayes\nparameters: {lr: {min: 1, max: 2}}\ncommand: ['${env}', python]\n")
    with pytest.raises(UserError, match="is a W&B sweep, not a run: write its `parameters` as a search space"):
        config_io.load(path)


def test_one_subject_of_sherlock_is_a_list_of_one(write):
    values = {
        "learning_rate": 3e-4,
        "fmri_weight": 2.0,
        "gradient_clip_val": None,
        "data": {"subjects": 1, "fps": 25.0},
    }
    config = config_io.load(write(values))[1]
    assert (config.data.subjects, config.optim.clip_norm) == ([1], None)


def test_a_world_model_of_hjepa_is_the_task_that_it_names(write):
    model = {"type": "lewm", "encoder_type": "vit_tiny_patch16_224", "embed_dim": 192, "action_dim": 3}
    model |= {"predictor": {"depth": 2, "num_heads": 4, "dropout": 0.0}, "projection_norm": "batchnorm"}
    data = {"data_path": "episodes", "seq_len": 8, "batch_size": 4, "image_size": 64}
    values = {"model": model, "data": data, "training": {"epochs": 3, "lr": 1e-4}, "planner": {"horizon": 5}}
    translation = config_io.translated(write(values))
    assert (translation.unknown, list(translation.replaced)) == ([], ["planner.horizon"])
    config = config_io.load(write(values))[1]
    assert config.task == "hjepa.world_model"
    assert (config.data.path, config.data.seq_len, config.data.batch_size) == ("episodes", 8, 4)
    assert (config.model.action_dim, config.model.predictor_depth, config.model.predictor_num_heads) == (3, 2, 4)


@pytest.mark.parametrize(("kind", "known"), [(None, True), ("hjepa", True), ("H-JEPA", True), ("vqvae", False)])
def test_a_model_type_that_is_neither_hjepa_nor_lewm_is_refused(kind, known, write):
    values = {"model": {"type": kind, "encoder_type": "vit_tiny_patch16_224", "num_hierarchies": 2}}
    values |= {"masking": {"num_masks": 4}, "training": {"epochs": 1}}
    if known:
        assert config_io.load(write(values))[1].task == "hjepa.pretrain"
    else:
        with pytest.raises(UserError, match="model.type: 'vqvae' is unknown; known: hjepa, lewm"):
            config_io.load(write(values))


def test_a_data_section_that_nothing_reads_is_refused(write):
    values = {"model": {"encoder_type": "vit_tiny_patch16_224", "num_hierarchies": 2}, "training": {"epochs": 1}}
    values |= {"masking": {"num_masks": 4}, "data": {"root": "here", "kind": "clips"}}
    with pytest.raises(UserError, match="data: nothing here reads data.root, data.kind"):
        config_io.load(write(values))
    del values["data"]
    config_io.load(write(values))


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({"checkpoint": {"metric": "val_loss"}}, {"evaluation.metric": "loss"}),
        ({"checkpoint": {"metric_name": "val_linear_probe_accuracy", "mode": "max"}}, {"evaluation.mode": "max"}),
        ({"checkpoint": {"metric": "val_knn_accuracy"}}, {"evaluation.metric": "knn_accuracy"}),
        ({"logging": {"use_tensorboard": False}}, {"tracking.tensorboard": False}),
        ({"logging": {"wandb": False}}, {"tracking.wandb": False}),
        ({"logging": {"wandb": True, "wandb_project": "mine"}}, {"tracking.wandb_project": "mine"}),
        ({"logging": {"tensorboard": False, "use_wandb": True}}, {"tracking.wandb": True}),
    ],
)
def test_trackers_and_the_best_metric_of_hjepa_are_read(section, wanted, write):
    values = {"model": {"encoder_type": "vit_tiny_patch16_224", "num_hierarchies": 2}, "training": {"epochs": 1}}
    translation = config_io.translated(write(values | section))
    assert translation.unknown == []
    flat = config_io.flatten(translation.settings)
    assert {key: flat[key] for key in wanted} == wanted


def test_a_hydra_option_names_the_file_to_start_from(tmp_path):
    (tmp_path / "training").mkdir()
    (tmp_path / "config.yaml").write_text("defaults:\n  - training: fast\n  - _self_\n")
    path = tmp_path / "training" / "fast.yaml"
    path.write_text("learning_rate: 1.0e-4\n")
    with pytest.raises(
        UserError, match=r"option of the group training .* start from --config .*config\.yaml training=fast"
    ):
        config_io.load(path)


def test_a_search_names_the_command_that_runs_it(tmp_path):
    path = tmp_path / "hpo.yaml"
    path.write_text("n_trials: 25\nsampler: tpe\nlearning_rate: {low: 1.0e-6, high: 5.0e-4}\n")
    with pytest.raises(UserError, match="is a search, not a run: .* jaxtrain tune --config F --space F"):
        config_io.load(path)
