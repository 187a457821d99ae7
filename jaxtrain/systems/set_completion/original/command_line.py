"""Map the original's command-line flags to settings; flags not listed here have the name of the setting's last part."""

ONE_UPDATE = "every step makes one update here: data.batch_size is --primary-batch-size / --sae-train-steps"
POOLED = "the autoencoder always looks at the pooled vector; leave it out"
FLAGS = {
    "data_path": "data.path",
    "random_state": "data.split_seed",
    "num_masks_per_set": "data.masks_per_set",
    "patience": "evaluation.patience",
    "scheduler_factor": "optim.schedule.factor",
    "scheduler_patience": "optim.schedule.patience",
    "checkpoint_interval": "checkpoint.every_epochs",
    "layer_norm": "model.use_layer_norm",
    "wandb_log": "tracking.wandb",
    "run_id": "run.name",
    "metric_update_interval": "metrics are exact over the whole split here, at no cost; leave it out",
}
SAE_FLAGS = {
    "data_csv": "data.path",
    "model_checkpoint": "sae.primary",
    "save_dir": "run.dir",
    "expansion_factor": "sae.expansion_factor",
    "l1_coeff": "sae.l1_coefficient",
    "usage_coeff": "sae.usage_coefficient",
    "kl_warmup_steps": "sae.usage_warmup_steps",
    "kl_period_steps": "sae.usage_period_steps",
    "kl_floor": "sae.usage_floor",
    "dead_neuron_threshold": "sae.dead_threshold",
    "sae_batch_size": "sae.batch_size",
    "primary_data_fraction": "data.fraction",
    "primary_embedding_dim": "model.embedding_dim",
    "primary_hidden_dim": "model.hidden_dim",
    "primary_num_layers": "model.num_layers",
    "primary_num_heads": "model.num_heads",
    "primary_num_inducing": "model.num_inducing_points",
    "primary_use_layernorm": "model.use_layer_norm",
    "primary_dropout": "model.dropout",
    "primary_batch_size": ONE_UPDATE,
    "sae_train_steps": ONE_UPDATE,
    "hook_target": POOLED,
    "hook_layer_index": POOLED,
    "hook_ff_module_index": POOLED,
}
