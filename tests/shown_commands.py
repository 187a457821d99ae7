"""Every command that README, CONTRIBUTING, docs/ and examples/ show: what a test executes, and why not the rest.

RUN: executed by tests/test_shown_commands.py, chain by chain in one folder: the command as shown -> what is added to it
("old=>new" replaces a word). LONG: the same, by `python -m tests.chaos.shown_commands`, as it takes minutes. ELSEWHERE:
the test that executes it, at a small size. NOT_RUN: the reason.
"""

import importlib
import json
import pathlib
import re
import shlex
from collections.abc import Iterator, Mapping

from jaxtrain.__main__ import ELSEWHERE as MODULES

ROOT = pathlib.Path(__file__).parents[1]

_STEPS = "shard.devices=1 train.steps=2 train.epochs=null tracking.tensorboard=false"
_DIGITS = f"configs/digits.yaml=>configs/digits_tiny.yaml {_STEPS} evaluation.every_steps=2 run.dir=runs/digits"
_SPLAT = f"{_STEPS} data.synthetic.sets=80 evaluation.every_steps=2"
_FILM = "data.synthetic_volumes=60 data.synthetic_subjects=1 model.n_voxels=189"
_SHERLOCK = f"{_STEPS} {_FILM} evaluation.every_steps=2"

RUN = {
    "digits": {
        "jaxtrain run --config F --profile": f"F=>configs/digits_tiny.yaml {_DIGITS} train.steps=4",
        "python -m jaxtrain.run --config configs/digits.yaml": _DIGITS,
        "python -m jaxtrain.run --config F": f"F=>configs/digits_tiny.yaml {_DIGITS} --dry-run",
        "python -m jaxtrain.checkpoints list --run runs/digits": "",
        "python -m jaxtrain.checkpoints verify --run runs/digits": "",
        "python -m jaxtrain.checkpoints prune --run runs/digits --keep-last 1 --keep-best 1": "",
        "jaxtrain export --run runs/x --output F": "runs/x=>runs/digits F=>digits.safetensors",
        "jaxtrain export --run DIR --output F.pt --optimizer": "DIR=>runs/digits",
        "python -m torch_bridge.verify --run runs/digits": "",
        "python -m jaxtrain.doctor": "",
    },
    "a system of one's own": {
        "python -m jaxtrain.run --config my_task.yaml data.batch_size=32 train.epochs=20": _STEPS,
    },
    "memory_lm": {
        "python -m jaxtrain.run --config configs/memory_lm_tiny.yaml": (
            "configs/memory_lm_tiny.yaml=>configs/memory_lm_micro.yaml "
            f"{_STEPS} evaluation.every_steps=2 run.dir=runs/memory_lm_tiny"
        ),
        'python -m jaxtrain.generate --run runs/memory_lm_tiny --prompt "def main("': "--max-new-tokens 2",
        "python -m jaxtrain.evaluate --run runs/memory_lm_tiny data.eval_dataset_name=held_out.jsonl "
        "data.multiple_choice=[questions.jsonl]": "data.text_field=text",
    },
}

LONG = {
    "set_completion": {
        "python -m jaxtrain.run --config configs/splat_small.yaml": (
            f"configs/splat_small.yaml=>configs/splat_tiny.yaml {_SPLAT} run.dir=runs/splat_small"
        ),
        "python -m jaxtrain.evaluate --run runs/splat_small": "",
        "python -m jaxtrain.run --config configs/splat_sae.yaml": (
            f"configs/splat_sae.yaml=>configs/splat_sae_tiny.yaml {_SPLAT} run.dir=runs/splat_sae"
        ),
        "python -m jaxtrain.evaluate --run runs/splat_sae": "",
    },
    "fmri_autoencoder": {
        "python -m jaxtrain.systems.fmri_autoencoder.prepare --data-dir data/sherlock "
        "--config configs/sherlock_gen1.yaml": (
            f"configs/sherlock_gen1.yaml=>configs/sherlock_tiny.yaml --synthetic {_SHERLOCK}"
        ),
        "python -m jaxtrain.run --config configs/sherlock_tiny.yaml": f"{_SHERLOCK} data.data_dir=data/sherlock",
        "python -m jaxtrain.evaluate --run runs/sherlock_tiny": "",
        "python -m jaxtrain.evaluate --run runs/sherlock_tiny lesion.at=bottleneck 'lesion.places=[3,17]'": "",
        "python -m jaxtrain.evaluate --run runs/sherlock_tiny lesion.at=voxels lesion.region=region.nii.gz "
        "lesion.factor=0.5": "",
    },
}

ELSEWHERE = {
    "tests/test_figures.py::test_benchmarks_and_the_tables_of_other_pages_are_what_the_results_say": [
        "python -m benchmarks.page",
    ],
    "tests/e2e/test_notebooks.py::test_a_tutorial_prints_what_it_shows": [
        "python docs/run_tutorials.py NAME",
    ],
    "tests/e2e/test_training_example.py": [
        "python examples/training_example.py",
    ],
    "tests/e2e/test_continuation_example.py": [
        "torchrun --nproc_per_node=2 examples/continuation/digits_ddp.py --until 200 --checkpoint jax.pt "
        "--output torch.pt",
    ],
    "tests/test_configs_load.py": [
        "python -m jaxtrain.run --config FILE",
    ],
    "tests/test_docs.py::test_the_first_15_minutes_run_as_the_page_shows_them": [
        "jaxtrain report --run runs/digits_cnn",
    ],
    "tests/e2e/test_completion.py::test_bash_offers_what_begins_as_typed": [
        "jaxtrain completion bash",
        "python -m jaxtrain.completion bash > ~/.local/share/bash-completion/completions/jaxtrain",
    ],
    "tests/e2e/test_failing_files.py::test_every_call_that_fails_is_one_sentence": [
        "python -m tests.failing_files run",
    ],
    "tests/e2e/test_lora.py::test_a_run_from_a_yaml_exports_both_folders": [
        "jaxtrain export --run DIR --format peft adapter",
    ],
    "tests/e2e/test_debug.py::test_the_command_that_the_message_names_finds_the_line": [
        "jaxtrain debug --run DIR --step 12",
    ],
    "tests/unit/engine/test_lr_find.py::test_the_command_writes_json_and_a_picture": [
        "python -m jaxtrain.lr_find --config F [--min-lr 1e-7 --max-lr 1 --steps 100 --no-clip]",
    ],
    "tests/contract/test_training.py::test_the_loss_falls_and_stays_finite": [
        "python -m jaxtrain.run --config configs/criteria_tiny.yaml",
        "python -m jaxtrain.run --config configs/hjepa_tiny.yaml",
        "python -m jaxtrain.run --config configs/hjepa_world_tiny.yaml",
        "python -m jaxtrain.run --config configs/hjepa_digits.yaml",  # hjepa_tiny's task and data, larger
    ],
    "tests/unit/hjepa/test_report.py::test_evaluate_writes_every_judge_the_baselines_and_the_pictures": [
        "python -m jaxtrain.evaluate --run runs/hjepa_digits",
        "python -m jaxtrain.evaluate --run runs/hjepa_digits probe.folds=5 probe.fine_tune_epochs=20",
    ],
    "tests/unit/criteria_evidence/test_report.py::test_a_share_report_has_every_field_of_both_questions": [
        "python -m jaxtrain.evaluate --run runs/criteria_tiny",
        "python -m jaxtrain.evaluate --run runs/evidence",
    ],
    "tests/unit/criteria_evidence/test_commands.py::"
    "test_an_exported_folder_has_its_tokenizer_and_gives_the_same_hidden_states": [
        "python -m jaxtrain.export --run runs/criteria_tiny --hf DIR",
    ],
    "tests/unit/criteria_evidence/test_commands.py::"
    "test_a_study_of_the_tiny_criteria_finds_a_better_config_than_a_poor_start": [
        "python -m jaxtrain.tune --config configs/criteria_tiny.yaml --space configs/hpo/criteria_tiny.yaml",
        "python -m jaxtrain.run --config runs/tune/criteria_tiny/best_config.yaml",
    ],
    "tests/contract/test_population.py::test_the_step_of_every_task_can_be_mapped_over_runs": [
        "python -m jaxtrain.tune --config configs/splat_tiny.yaml --space configs/hpo/splat_tiny.yaml --vmap 16",
    ],
    "tests/unit/memory_lm/test_exports.py::test_the_lora_reloads_in_peft_with_the_same_logits": [
        "python -m jaxtrain.export --run DIR",
    ],
    "tests/e2e/test_plan.py::test_fsdp_keeps_an_eighth_of_the_state_on_each_device": [
        "jaxtrain plan --config F --devices 8 --target h200",
        "python -m jaxtrain.plan --config F --devices 64 --target h200 shard.strategy=fsdp",
    ],
    "tests/e2e/test_plan.py::test_devices_that_share_a_row_send_keys_and_gather_weights_alone": [
        "python -m jaxtrain.plan --config configs/memory_lm_128k.yaml --devices 8 --target h200 --predict --no-fit "
        "data.tokenizer=bytes",
    ],
    "tests/unit/engine/test_gpu_cards.py::test_a_table_of_kinds_puts_the_cheapest_that_fits_first": [
        "python -m jaxtrain.plan --config F --devices 8 --shop --prices prices.yaml --samples 1000000",
    ],
    "tests/e2e/test_science.py::test_lbfgs_of_optax_takes_burgers_equation_below_adam": [
        "python examples/science/burgers.py",
    ],
    "tests/unit/tuning/test_sweep.py::test_the_example_ranks_its_runs_and_loads_the_best_into_torch": [
        "python examples/sweep.py",
    ],
    "tests/e2e/test_script_doctor.py::test_the_loss_of_a_plain_loop_is_compiled_from_its_lines": [
        "python -m jaxtrain.doctor --script train.py -- --epochs 1",
        "python -m jaxtrain.doctor --script train.py --json -- ARGUMENTS",
    ],
    "tests/e2e/test_plan.py::test_a_prediction_names_its_kernels_and_its_price": [
        "python -m jaxtrain.plan --config F --devices 1 --predict",
        "python -m jaxtrain.plan --config F --devices 8 --target h100 --predict",
    ],
    "tests/e2e/test_processes.py::test_processes_train_as_one": [
        "torchrun --nproc_per_node=8 -m jaxtrain.run --config F",
        "torchrun --nproc_per_node=4 -m jaxtrain.run --config configs/default.yaml",
        "torchrun --nproc_per_node=4 -m jaxtrain.run --config configs/base_small.yaml shard.strategy=fsdp",
        "torchrun --nproc_per_node=8 -m jaxtrain.run --config examples/train_config.yaml",
        "torchrun --nproc_per_node=4 -m jaxtrain.run --config configs/splat_production.yaml "
        "data.path=data/tokenized.csv data.vocab_path=data/vocab.json "
        "data.weapon_vocab_path=data/weapon_vocab.json run.dir=checkpoints",
        "torchrun --nnodes=2 --nproc_per_node=8 --node_rank=0 --master_addr=<node0_ip> --master_port=12355 "
        "-m jaxtrain.run --config examples/train_config.yaml",
        "accelerate launch --num_processes 4 -m jaxtrain.run --config configs/base_small.yaml",
        "srun python -m jaxtrain.run --config F",  # under the variables that Slurm and OpenMPI set
        "mpirun -np 8 python -m jaxtrain.run --config F",
    ],
    "tests/e2e/test_best_weights.py::test_the_export_of_a_run_made_in_python_holds_the_best_weights_bit_for_bit": [
        "jaxtrain export --run DIR --output F.pt",
    ],
    "tests/e2e/test_best_weights.py::test_evaluate_reports_what_the_run_recorded": ["jaxtrain evaluate --run DIR"],
    "tests/unit/bridge/test_torchvision_operators.py::"
    "test_what_imports_torchvision_can_be_imported_and_its_models_compute": [
        "python -m torch_bridge.torchvision_operators",
    ],
    "tests/e2e/test_own_script.py::test_two_processes_of_a_script_train_the_model_of_one": [
        "torchrun --nproc_per_node=8 train.py",
        "torchrun --nproc_per_node=2 train.py",
        "srun --ntasks=2 python train.py",  # under the variables that Slurm and OpenMPI set
        "mpirun -np 2 python train.py",
    ],
    "tests/e2e/test_continuation_example.py::test_jax_then_torch_ddp_ends_where_jax_does": [
        "python -m jaxtrain.run --config examples/continuation/digits.yaml run.dir=runs/jax",
        "python -m jaxtrain.export --run runs/jax --checkpoint 100 --optimizer --output runs/jax_100.pt",
        "torchrun --nproc_per_node=2 examples/continuation/digits_ddp.py --checkpoint runs/jax_100.pt "
        "--output runs/jax_torch.pt",
        "python -m jaxtrain.export --run runs/jax --checkpoint 200 --output runs/jax_200.pt",
        "python examples/continuation/distance.py runs/jax_torch.pt runs/jax_200.pt",
    ],
    "tests/e2e/test_continuation_example.py::test_torch_ddp_then_jax_ends_where_torch_does": [
        "torchrun --nproc_per_node=2 examples/continuation/digits_ddp.py --until 100 --output runs/torch_100.pt",
        "python -m jaxtrain.run --config examples/continuation/digits.yaml run.dir=runs/torch_jax "
        "init_from=runs/torch_100.pt",
        "torchrun --nproc_per_node=2 examples/continuation/digits_ddp.py --until 200 --output runs/torch_200.pt",
        "python -m jaxtrain.export --run runs/torch_jax --checkpoint last --output runs/torch_jax.pt",
        "python examples/continuation/distance.py runs/torch_jax.pt runs/torch_200.pt",
    ],
    "tests/e2e/test_own_model_example.py::test_the_notebook_runs_from_top_to_bottom_and_torch_agrees_with_jax": [
        "python examples/own_model/train.py"
    ],
    "tests/e2e/test_own_model_example.py::test_the_server_gives_the_networks_own_answers": [
        "python examples/own_model/server.py --weights runs/own_model/exports/net.pt",
    ],
    "tests/e2e/test_originals_snippets.py::test_a_file_of_an_original_starts_a_run": [
        "python -m jaxtrain.run --config configs/default.yaml",
        "python -m jaxtrain.run --config configs/default.yaml --device cuda:1",
    ],
    "tests/e2e/test_originals_snippets.py::test_every_yaml_block_is_a_config": [
        "python -m jaxtrain.run --config configs/base_small.yaml",
        "python -m jaxtrain.run --config examples/train_config.yaml",
        "python -m jaxtrain.run --config examples/train_config.yaml data.data_dir=data",
        "python -m jaxtrain.systems.fmri_autoencoder.prepare --config examples/train_config.yaml",
    ],
    "tests/e2e/test_originals_snippets.py::test_a_command_of_the_tables_names_settings_that_exist": [
        "python -m jaxtrain.run --config configs/criteria_bert.yaml",
        "python -m jaxtrain.run --config configs/criteria_bert.yaml train.epochs=20 data.batch_size=32 optim.lr=3e-5",
        "python -m jaxtrain.run --config configs/criteria_roberta.yaml",
        "python -m jaxtrain.run --config configs/evidence.yaml",
        "python -m jaxtrain.run --config configs/joint.yaml",
    ],
    "tests/unit/engine/test_flags.py::test_the_splatnlp_readmes_command_line_is_taken_word_for_word": [
        "python -m jaxtrain.run --config configs/splat_production.yaml --embedding_dim 32 --hidden_dim 512 "
        "--num_layers 3 --learning_rate 1e-4 --batch_size 1024 --use_mixed_precision True --num_workers 16 "
        "--dropout 0.3 --num_epochs 20",
    ],
    "tests/unit/reporting/test_page.py::"
    "test_the_page_holds_summary_curves_config_tables_and_pictures_without_a_request": [
        "python -m jaxtrain.report --run checkpoints",
    ],
    "tests/unit/engine/test_evaluate.py::"
    "test_a_checkpoint_is_evaluated_without_the_weights_that_the_run_started_from": [
        "python -m jaxtrain.evaluate --run runs/criteria_bert --checkpoint best --split test",
        "python -m jaxtrain.evaluate --run runs/criteria_bert data.path=data/custom.csv",
    ],
    "tests/test_docs.py::test_the_tables_and_the_picture_are_as_the_code_has_them": [
        "python docs/generate_gallery.py",
        "python docs/generate_reference.py",
        "python docs/generate_operators.py",
        "python docs/generate_drop_in_flags.py",
        "python docs/generate_config_stub.py",
        "python docs/generate_config_schema.py",
    ],
    "tests/e2e/test_certificate.py::test_the_command_writes_a_page_and_its_json": [
        "jaxtrain verify --module my_pkg:make_model --data my_pkg:make_data --steps 20 --output certificate",
    ],
    "tests/e2e/test_drop_in_examples.py::test_an_example_is_the_same_under_both_engines": [
        "python examples/drop_in/lightning_autoencoder.py --engine jaxtrain --output curve.json",
        *(
            f"python examples/drop_in/{path.name} --engine jaxtrain"
            for path in sorted(ROOT.glob("examples/drop_in/*_*.py"))
        ),
    ],
}

NOT_RUN = {
    "installs an environment; the continuous integration and tests/chaos/packaging.py do": [
        "python -m tests.chaos.packaging",
        "make docs",
        "python3 -m venv .venv && . .venv/bin/activate",
        "make lint",
        "make run",
        "make test",
        "make test-all",
        "make test-contracts",
        "make test-sessions",
        "make typecheck",
        "pip install -e '.[cuda,torch]'",
        "pip install -e '.[cuda]'",
        "pip install -e '.[drop-in,torch]'",
        "pip install -e '.[fmri]'",
        "pip install -e '.[hydra]'",
        "pip install -e '.[plan-tpu]'",
        "pip install -e '.[plan]'",
        "pip install -e '.[torch]'",
        "pip install torchvision --index-url https://download.pytorch.org/whl/cpu",
        "pip install pre-commit && pre-commit install",
    ],
    "runs for minutes and makes figures; the command's parser and example are tested (tests/test_public_api.py)": [
        "python -m benchmarks.architectures",
        "python -m benchmarks.certificates",
        "python -m benchmarks.chunked_loss",
        "python -m benchmarks.collectives",
        "python -m benchmarks.compare --precision bf16",
        "python -m benchmarks.operators",
        "python -m benchmarks.own_loop",
        "python -m benchmarks.compare --system S --peer torch_eager",
        "python -m benchmarks.compare --system S --peer torch_eager torch_compile",
        "python -m benchmarks.compare --system S --peer torch_ddp --devices 2",
        "python -m benchmarks.compare --system hjepa --peer torch_eager",
        "python -m benchmarks.compare --system set_completion --fed shard.threads=null",
        "python -m benchmarks.converted_bert",
        "python -m benchmarks.convolutions",
        "python -m benchmarks.drop_in --write",
        "python -m benchmarks.drop_masked",
        "python -m benchmarks.first_call",
        "python -m benchmarks.input_pipeline",
        "python -m benchmarks.input_pipeline --config configs/sherlock_full_data.yaml --rounds 3",
        "python -m benchmarks.load_memory",
        "python -m benchmarks.load_memory --kinds devices",
        "python -m benchmarks.loop_overhead",
        "python -m benchmarks.many_lengths",
        "python -m benchmarks.packing",
        "python -m benchmarks.population",
        "python -m benchmarks.predict",
        "python -m benchmarks.startup",
        "python -m benchmarks.steps_per_call",
        "python -m benchmarks.public_trainings",
        "python -m benchmarks.sweep",
        "python -m benchmarks.torch_backend --json backend.json",
    ],
    "takes minutes to hours; done by hand before a release": [
        "python -m tests.chaos.config_fuzz --count 2000 --seed 7",
        "python -m tests.chaos.soak --steps 3000 --minutes 30",
        "python -m tests.chaos.damages --damages 40 --seed 4",
        "python -m tests.chaos.hostile",
        "python -m tests.chaos.command_lines --count 300 --seed 2",
        "python -m tests.chaos.full_disk",
        "python -m tests.chaos.full_size_model",
        "python -m tests.chaos.goldens_in_torch",
        "python -m tests.chaos.kills --kills 100",
        "python -m tests.chaos.resume_matrix",
        "python -m tests.chaos.shown_commands",
        "python -m tests.chaos.tasks_in_processes",
        "python -m tests.chaos.tasks_in_processes --tasks memory_lm.adapter --processes 4",
        "python -m tests.chaos.terms --terms 60 --seed 10",
        "python -m tests.chaos.timm_vit_base",
    ],
    "another library's launcher, by its name alone; tests/e2e/test_torchrun.py starts processes": ["accelerate launch"],
    "needs a GPU": [
        "bash benchmarks/gpu.sh compare",
        "bash benchmarks/gpu.sh contact",
        "python -m benchmarks.attention_kernels",
    ],
    "needs several GPUs; the flag is XLA's own": [
        "XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=false torchrun --nproc_per_node=8 "
        "-m jaxtrain.run --config F",
    ],
    "needs weights, texts or tables that are not in the repository; its settings are checked": [
        "python -m jaxtrain.run --config configs/criteria_bert.yaml data.path=DIR/redsm5_annotations.csv",
        "python -m jaxtrain.run --config configs/memory_lm_paper.yaml --dry-run",
        "python -m jaxtrain.run --config configs/splat_production.yaml data.path=data/tokenized.csv "
        "data.vocab_path=data/vocab.json data.weapon_vocab_path=data/weapon_vocab.json",
        "python -m jaxtrain.tune --config configs/criteria_bert.yaml --space configs/hpo/criteria_coarse.yaml "
        "train.epochs=6",
        "python -m jaxtrain.tune --config configs/criteria_bert.yaml --space configs/hpo/criteria_sanity.yaml "
        "train.epochs=3",
        "python -m jaxtrain.tune --config configs/criteria_roberta.yaml --space configs/hpo/criteria_fine.yaml",
        "python -m jaxtrain.tune --config runs/tune/criteria_coarse/best_config.yaml "
        "--space configs/hpo/criteria_fine.yaml train.epochs=10",
        "python -m jaxtrain.tune --config runs/tune/criteria_fine/best_config.yaml "
        "--space configs/hpo/criteria_refit.yaml train.epochs=12 evaluation.patience=5",
        "python -m jaxtrain.run --config runs/tune/criteria_fine/best_config.yaml",
        "python -m jaxtrain.export --run outputs --output model.pt",
    ],
    "compiles for a TPU with libtpu, which the environment of the tests does not have": [
        "jaxtrain plan --config F --devices 8 --target v5e",
        "python -m jaxtrain.plan --config F --devices 8 --target v5e --predict shard.strategy=fsdp",
    ],
    "asks questions; the file that it writes is read by tests/e2e/test_drop_in_accelerate_sharded.py": [
        "accelerate config",
    ],
    "is a script of the reader's": [
        "python train.py",
    ],
    "compiles a step of two billion parameters for minutes; tests/e2e/test_plan.py plans a smaller one": [
        "python -m jaxtrain.plan --config configs/sherlock_gen1.yaml --devices 1",
    ],
    "is torch's own, shown beside ours": [
        "torchrun --nproc_per_node=4",
    ],
    "is the test suite": [
        "python -m pytest tests/unit/fmri_autoencoder",
        "python -m pytest tests/unit/fmri_autoencoder/test_losses.py",
        "python -m pytest tests/unit/fmri_autoencoder/test_torch_compat.py",
    ],
}


def words(command: str) -> tuple[str, list[str]]:
    """The module that a command line starts, and what it is given."""
    found = shlex.split(re.sub(r"^(?:[A-Z_]+=\S+ )+", "", command).partition(" > ")[0])
    if found[0] == "jaxtrain":
        return MODULES.get(found[1], f"jaxtrain.{found[1]}"), found[2:]
    return found[found.index("-m") + 1], found[found.index("-m") + 2 :]


def in_turn(chain: str, shown: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    """Run the commands of a chain in this folder: (command, exit code)."""
    _prepare(chain)
    for command, more in shown.items():
        module, given = words(command)
        renamed = dict(word.split("=>") for word in more.split() if "=>" in word)
        given = [renamed.get(word, word) for word in given] + [word for word in more.split() if "=>" not in word]
        yield command, importlib.import_module(module).main(given)


def _prepare(chain: str) -> None:
    """What the pages' readers have of their own."""
    if chain == "a system of one's own":
        page = (ROOT / "docs/adding_a_system.md").read_text()
        pathlib.Path("my_package").mkdir()
        pathlib.Path("my_package/__init__.py").write_text(
            re.search(r"```python\n(# my_package.*?)```", page, re.S).group(1)
        )
        pathlib.Path("my_task.yaml").write_text("task: my_package.train\n")
    if chain == "memory_lm":
        pathlib.Path("held_out.jsonl").write_text('{"text": "def main(): return 1"}\n' * 4)
        question = {"question": "1 + 1 =", "choices": ["2", "3"], "answer": 0}
        pathlib.Path("questions.jsonl").write_text(json.dumps(question) + "\n")
    if chain == "fmri_autoencoder":
        import nibabel
        import numpy as np

        nibabel.save(nibabel.Nifti1Image(np.ones((9, 10, 7), np.float32), np.eye(4)), "region.nii.gz")
