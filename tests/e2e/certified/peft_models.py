"""LoRA of peft on a model of transformers: only the adapters train."""

from peft import LoraConfig, get_peft_model

from tests.e2e.certified import Certified
from tests.e2e.certified.transformers_models import llama


def lora():
    module, data, loss = llama()
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    return get_peft_model(module, config), data, loss


MODELS = [Certified("LoRA on Llama", lora)]
