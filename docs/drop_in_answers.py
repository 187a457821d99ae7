"""What each name of the three APIs does under `jaxtrain.{lightning,transformers,accelerate}`.

yes: the library's own code handles it. no: refused, with the reason. ignored: accepted without an effect. otherwise:
yes, but the step is not one program then, or something else is to be known.
"""

APART = "the modules run compiled, the rest of the step in torch"

ANSWERS = {
    "lightning.Trainer(...)": {
        "yes": """accelerator devices num_nodes logger callbacks fast_dev_run max_epochs min_epochs max_steps min_steps
            max_time limit_train_batches limit_val_batches limit_test_batches limit_predict_batches overfit_batches
            val_check_interval check_val_every_n_epoch num_sanity_val_steps log_every_n_steps enable_checkpointing
            enable_progress_bar enable_model_summary accumulate_grad_batches gradient_clip_val deterministic
            inference_mode use_distributed_sampler barebones reload_dataloaders_every_n_epochs default_root_dir
            enable_autolog_hparams model_registry""",
        "no": {"detect_anomaly": "torch's anomaly detection watches its autograd, which does not run"},
        "ignored": {"benchmark": "it chooses cuDNN's kernels; XLA chooses its own"},
        "otherwise": {
            "strategy": f"`auto` and `ddp`; with several processes {APART}. `fsdp` and `deepspeed_stage_N` split over "
            "all devices of one process; offloading and model parallel: refused",
            "precision": "`32-true` and `bf16-mixed`; others are refused",
            "gradient_clip_algorithm": f"`norm` in the compiled step; for `value` {APART}",
            "profiler": "the compiled step is one entry, `[CompiledStep]training_step`",
            "plugins": "those that leave precision and strategy as above",
            "sync_batchnorm": "on one process; refused on several",
        },
    },
    "lightning.Trainer methods": {
        "yes": "fit predict print save_checkpoint test validate",
        "ignored": {"init_module": "for FSDP and meta devices; without them it changes nothing"},
    },
    "LightningModule": {
        "yes": """all_gather configure_callbacks configure_model configure_optimizers configure_sharded_model freeze
            load_from_checkpoint log log_dict lr_scheduler_step lr_schedulers on_after_batch_transfer
            on_before_batch_transfer on_fit_end on_fit_start on_load_checkpoint on_predict_batch_end
            on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_model_eval
            on_predict_start on_save_checkpoint on_test_batch_end on_test_batch_start on_test_end on_test_epoch_end
            on_test_epoch_start on_test_model_eval on_test_model_train on_test_start on_train_end on_train_epoch_end
            on_train_epoch_start on_train_start on_validation_batch_end on_validation_batch_start on_validation_end
            on_validation_epoch_end on_validation_epoch_start on_validation_model_eval on_validation_model_train
            on_train_batch_end on_train_batch_start
            on_validation_model_zero_grad on_validation_start predict_dataloader predict_step prepare_data print
            remove_ignored_hparams save_hyperparameters setup teardown test_dataloader test_step to_onnx to_tensorrt
            to_torchscript train_dataloader transfer_batch_to_device unfreeze val_dataloader validation_step""",
        "otherwise": {
            "training_step": "captured by TorchDynamo and compiled; `batch_idx`, `current_epoch`, `global_step` and "
            "learning rates may change, what Python branches on leads to at most 8 graphs",
            "optimizers": f"in `training_step`: the learning rates; if it sets one, {APART}",
            **dict.fromkeys(
                """backward clip_gradients configure_gradient_clipping manual_backward on_after_backward
                on_before_backward on_before_optimizer_step on_before_zero_grad optimizer_step optimizer_zero_grad
                toggle_optimizer toggled_optimizer untoggle_optimizer""".split(),
                f"if it is your own or you optimize manually, {APART}",
            ),
        },
    },
    "LightningDataModule": {
        "yes": """from_datasets load_from_checkpoint load_state_dict on_after_batch_transfer on_before_batch_transfer
            on_exception predict_dataloader prepare_data remove_ignored_hparams save_hyperparameters setup state_dict
            teardown test_dataloader train_dataloader transfer_batch_to_device val_dataloader""",
    },
    "lightning Callback": {
        "yes": """load_state_dict on_exception on_fit_end on_fit_start on_load_checkpoint on_predict_batch_end
            on_predict_batch_start on_predict_end on_predict_epoch_end on_predict_epoch_start on_predict_start
            on_sanity_check_end on_sanity_check_start on_save_checkpoint on_test_batch_end on_test_batch_start
            on_test_end on_test_epoch_end on_test_epoch_start on_test_start on_train_end on_train_epoch_end
            on_train_epoch_start on_train_start on_validation_batch_end on_validation_batch_start on_validation_end
            on_validation_epoch_end on_validation_epoch_start on_validation_start setup state_dict teardown""",
        "otherwise": {
            **dict.fromkeys(
                "on_train_batch_start on_train_batch_end".split(),
                f"if it is your own and reads `.grad`, {APART}",
            ),
            **dict.fromkeys(
                "on_after_backward on_before_backward on_before_optimizer_step on_before_zero_grad".split(),
                f"with your own code: {APART}",
            ),
        },
    },
    "TrainingArguments": {
        "yes": """output_dir per_device_train_batch_size num_train_epochs max_steps learning_rate lr_scheduler_type
            lr_scheduler_kwargs warmup_steps optim_args weight_decay adam_beta1 adam_beta2 adam_epsilon
            gradient_accumulation_steps average_tokens_across_devices max_grad_norm label_smoothing_factor bf16
            bf16_full_eval use_cache logging_strategy logging_steps logging_first_step
            log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica
            disable_tqdm report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id
            eval_strategy eval_steps eval_delay per_device_eval_batch_size prediction_loss_only eval_on_start
            eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
            batch_eval_metrics save_only_model save_strategy save_steps save_on_each_node save_total_limit
            enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
            restore_callback_states_from_checkpoint full_determinism seed data_seed use_cpu dataloader_drop_last
            dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor
            dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
            train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb
            ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout skip_memory_metrics do_train do_eval
            do_predict resume_from_checkpoint local_rank""",
        "no": {
            "fp16": "float16 needs a loss scale inside the step; use `bf16`",
            "fp16_full_eval": "use `bf16_full_eval`",
            "torch_compile": "the step is compiled by XLA already",
            "use_liger_kernel": "its kernels are CUDA's",
            "auto_find_batch_size": "choose the batch size yourself",
            "push_to_hub": "nothing is uploaded; call `model.push_to_hub()` after training",
            "deepspeed": "JAX shards the state itself",
            "parallelism_config": "`jaxtrain.Trainer` with `shard`",
            "debug": "it watches torch's own forward pass",
        },
        "ignored": {
            "tf32": "of torch's kernels; XLA has its own setting, `jax_default_matmul_precision`",
            "torch_empty_cache_steps": "torch holds no memory of the step",
            "torch_compile_backend": "goes with `torch_compile`",
            "torch_compile_mode": "goes with `torch_compile`",
            "liger_kernel_config": "goes with `use_liger_kernel`",
            **dict.fromkeys(
                "hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision".split(),
                "goes with `push_to_hub`",
            ),
        },
        "otherwise": {
            "optim": "`adamw_torch`, `adamw_torch_fused`, `sgd`, `adagrad`, `rmsprop` and what else [has a "
            f"counterpart](own_loop.md) are part of the step; with others, as `adafactor`, {APART}",
            "optim_target_modules": f"for GaLore and its like, with which {APART}",
            "neftune_noise_alpha": f"its hook reads a number out of a tensor: {APART}",
            "accelerator_config": "without `split_batches`, which is refused",
            "fsdp": "splits weights and moments over all devices of one process",
            "fsdp_config": "`reshard_after_forward`; `cpu_offload`, `activation_checkpointing`, `xla` are refused",
            **dict.fromkeys(
                "gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing "
                "activation_checkpointing_kwargs".split(),
                "accepted; XLA decides what is recomputed",
            ),
        },
    },
    "Seq2SeqTrainingArguments": {
        "yes": "sortish_sampler predict_with_generate generation_max_length generation_num_beams generation_config",
    },
    "transformers.Trainer(...)": {
        "yes": """model args data_collator train_dataset eval_dataset processing_class model_init compute_loss_func
            compute_metrics callbacks preprocess_logits_for_metrics""",
        "otherwise": {
            "optimizers": "any lr_scheduler; torch.optim optimizers that [have a counterpart](own_loop.md) are part of "
            f"the step, with others {APART}",
            "optimizer_cls_and_kwargs": "as `optimizers`",
        },
    },
    "transformers.Trainer methods": {
        "yes": """add_callback autocast_smart_context_manager call_model_init compute_loss_context_manager
            create_accelerator_and_postprocess create_model_card create_optimizer create_optimizer_and_scheduler
            create_scheduler end evaluate evaluation_loop floating_point_ops get_batch_samples get_cp_size
            get_decay_parameter_names get_eval_dataloader get_learning_rates get_num_trainable_parameters
            get_optimizer_cls_and_kwargs get_optimizer_group get_sp_size get_test_dataloader
            get_total_train_batch_size get_tp_size get_train_dataloader hyperparameter_search init_hf_repo
            is_local_process_zero is_world_process_zero log log_metrics metrics_format num_examples pop_callback
            predict prediction_step remove_callback save_metrics save_model save_state set_initial_training_values
            store_flos train""",
        "otherwise": {
            "compute_loss": "your own too: recorded once and compiled",
            "training_step": "one compiled micro-batch; an own one that calls `super()` sees its loss",
            "push_to_hub": "transformers' own, when you call it",
        },
    },
    "TrainerCallback": {
        "yes": """on_epoch_begin on_epoch_end on_evaluate on_init_end on_log on_predict on_prediction_step on_push_begin
            on_save on_step_begin on_step_end on_train_begin on_train_end""",
        "otherwise": {
            **dict.fromkeys(
                "on_pre_optimizer_step on_optimizer_step on_substep_end".split(),
                f"with your own code, which may read gradients: {APART}",
            ),
        },
    },
    "Accelerator(...)": {
        "yes": """device_placement split_batches gradient_accumulation_steps cpu dataloader_config rng_types log_with
            project_dir project_config gradient_accumulation_plugin step_scheduler_with_optimizer kwargs_handlers""",
        "no": {
            **dict.fromkeys(
                "megatron_lm_plugin torch_tp_plugin parallelism_config".split(),
                "they take the parameters apart that the compiled model reads",
            ),
            "dynamo_backend": "the model is compiled by XLA already",
            "dynamo_plugin": "as `dynamo_backend`",
        },
        "otherwise": {
            "fsdp_plugin": "splits weights, gradients and moments over all devices of one process; offloading, "
            "activation checkpointing and sharded files are refused",
            "deepspeed_plugin": "the stage of its `zero_optimization`; the rest is refused",
            "deepspeed_plugins": "as `deepspeed_plugin`, one",
            "mixed_precision": "`no` and `bf16`; fp16 and fp8 are refused",
        },
    },
    "Accelerator methods": {
        "yes": """accumulate autocast backward check_trigger clear clip_grad_norm_ clip_grad_value_ end_training
            free_memory gather gather_for_metrics get_state_dict get_tracker init_trackers join_uneven_inputs load_state
            local_main_process_first log main_process_first no_sync on_last_process on_local_main_process
            on_local_process on_main_process on_process pad_across_processes prepare prepare_data_loader prepare_model
            prepare_optimizer prepare_scheduler print profile reduce register_for_checkpointing
            register_load_state_pre_hook register_save_state_pre_hook save save_model save_state set_trigger
            skip_first_batches split_between_processes trigger_sync_in_backward unwrap_model verify_device_map
            wait_for_everyone""",
        "no": {
            "deepspeed_ulysses_dl_adapter": "DeepSpeed's",
            "lomo_backward": "its optimizer updates inside torch's backward pass",
            "maybe_context_parallel": "goes with `parallelism_config`",
        },
        "ignored": {"unscale_gradients": "there is no loss scale without fp16"},
    },
}
