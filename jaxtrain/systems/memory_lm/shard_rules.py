"""Tensor-parallel rules: `shard.tensor` splits heads, the MLP's inner width, and the vocabulary if divisible."""

from jaxtrain.runtime.tensor_rules import Rules, check_divides, columns, rows

COLUMNS = r".*\b(self_attn|memory_attn)\.[qkv]_proj|.*\bmemory_attn\.[qkv]_up|.*mlp\.(gate|up)_proj"
ROWS = r".*\b(self_attn|memory_attn)\.o_proj|.*\bmemory_attn\.o_down|.*mlp\.down_proj"
VOCABULARY = r"(.*\.)?(embed_tokens|lm_head)"


def scratch(config) -> Rules:
    """Return the rules of a MemoryTransformer. Raises UserError if shard.tensor does not divide heads and widths."""
    model = config.model
    return _rules(config, model.num_heads, model.kv_heads, model.intermediate_dim, model.vocab_size)


def adapter(config) -> Rules:
    """Return the rules of a MemoryAdapter, LoRA included. Raises UserError as `scratch` does."""
    from jaxtrain.systems.memory_lm.adapter import backbone_config

    base = backbone_config(config.model)
    return _rules(config, base.num_heads, base.kv_heads, base.intermediate_size, base.vocab_size)


def _rules(config, heads: int, kv_heads: int, inner: int, vocabulary: int) -> Rules:
    tensor, memory = config.shard.tensor, config.memory
    sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "intermediate size": inner}
    sizes = {f"the model's {name}": size for name, size in sizes.items()}
    if not memory.vanilla_mode:
        sizes["memory.memory_num_heads"] = memory.memory_num_heads or heads
        sizes["memory.memory_num_kv_heads"] = memory.memory_num_kv_heads or kv_heads
    check_divides(tensor, sizes)
    divided = {} if vocabulary % tensor else columns(VOCABULARY)
    return {**columns(COLUMNS), **rows(ROWS), **divided}
