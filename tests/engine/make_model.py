"""Make a small random language model that vLLM can serve, without a download. Runs in the engine's environment.

    make_model.py FOLDER LAYERS HIDDEN

The tokenizer is a byte-level BPE trained on text made here. Weights are random, but the output stays ASCII words and
never ends by itself: one dimension of the residual stream is kept constant, and tokens that are no words have a large
negative weight on it. So answers are as long as `max_tokens` says, and valid UTF-8.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

SPECIAL = ["<|pad|>", "<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
WORDS = (  # noqa: SIM905 - prose is easier to keep than a list of quotes
    "the of and to in is that it was for on are as with they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out then she many some so these would "
    "other into has more two like see time could no make than first been its who now people over down only way find "
    "use may water long little very after words called just where most know railway switch signal sleeper ballast "
    "point lever lamp block token bell yard engine driver guard track junction platform train station answer question"
).split()
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONTEXT_TOKENS = 16_384


def make_tokenizer(folder: Path) -> Tokenizer:
    """Train, save, and describe it as transformers expects."""
    rng = Random(0)
    text = [" ".join(rng.choice(WORDS) for _ in range(rng.randint(5, 30))).capitalize() + "." for _ in range(3000)]
    tokenizer = Tokenizer(models.BPE(unk_token=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=1024, special_tokens=SPECIAL, show_progress=False, initial_alphabet=alphabet
    )
    tokenizer.train_from_iterator(text, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {
        str(tokenizer.token_to_id(name)): {
            "content": name, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False,
            "special": True,
        }
        for name in SPECIAL
    }  # fmt: skip
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": CONTEXT_TOKENS, "bos_token": "<|bos|>",
        "eos_token": "<|im_end|>", "pad_token": "<|pad|>", "add_bos_token": False, "add_eos_token": False,
        "clean_up_tokenization_spaces": False, "added_tokens_decoder": special, "chat_template": TEMPLATE,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(described))
    return tokenizer


def make_weights(folder: Path, tokenizer: Tokenizer, layers: int, hidden: int) -> None:
    """Random weights that only ever say words."""
    torch.manual_seed(0)
    ids = {name: tokenizer.token_to_id(name) for name in SPECIAL}
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=hidden, intermediate_size=2 * hidden,
        num_hidden_layers=layers, num_attention_heads=hidden // 32, num_key_value_heads=2,
        max_position_embeddings=CONTEXT_TOKENS, bos_token_id=ids["<|bos|>"], eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|pad|>"], tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    no_words = [token for text, token in tokenizer.get_vocab().items() if not _is_word(text)]
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.3)
        model.model.embed_tokens.weight[:, 0] = 1.0
        model.lm_head.weight.normal_(0, 0.1)
        model.lm_head.weight[:, 0] = 0.0
        model.lm_head.weight[no_words, 0] = -50.0
        for layer in model.model.layers:
            for name, part in layer.named_modules():
                if name.endswith("_proj"):
                    part.weight.normal_(0, part.in_features**-0.5)
            layer.self_attn.o_proj.weight[0] = 0.0
            layer.mlp.down_proj.weight[0] = 0.0
    model.save_pretrained(folder, safe_serialization=True)


def _is_word(text: str) -> bool:
    word = text.removeprefix("\u0120")  # how byte-level BPE writes the space before a word
    return len(text) > 1 and word.isascii() and word.isalpha()


def main() -> None:
    """Into FOLDER."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    make_weights(folder, make_tokenizer(folder), int(sys.argv[2]), int(sys.argv[3]))


if __name__ == "__main__":
    main()
