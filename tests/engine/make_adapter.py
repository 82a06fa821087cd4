"""Make a small random LoRA adapter for a model of make_model.py's. Runs in the engine's environment.

make_adapter.py FOLDER MODEL_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

RANK = 8


def main() -> None:
    """Into FOLDER."""
    folder, model = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((model / "config.json").read_text())
    hidden = config["hidden_size"]
    kv = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
    torch.manual_seed(1)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, out in (("q_proj", hidden), ("v_proj", kv)):
            place = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{place}.lora_A.weight"] = torch.randn(RANK, hidden) * 0.5
            weights[f"{place}.lora_B.weight"] = torch.randn(out, RANK) * 0.5
    save_file(weights, folder / "adapter_model.safetensors")
    described = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0,
        "bias": "none", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(model),
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(described))


if __name__ == "__main__":
    main()
