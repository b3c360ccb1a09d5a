"""The tiny model: a 0.43 M-parameter byte-level Llama, made on the spot and warm-started on one task.

Notable:
- Deterministic: one thread, one seed, same bytes. About ten seconds for `add`.
- The warm start is short on purpose: sampled reward begins between 0.2 and 0.55, so that there is something to learn.
- The folder is an ordinary Hugging Face folder: transformers, vLLM and our engine read it. It appears under its name
  only when complete.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from services.config.tasks import Segment, examples
from services.model.attention import IMPLEMENTATION
from services.model.layout import PackedLayout
from services.model.load import packed_logits
from services.runtime.durable import rename_dir

SPECIAL_TOKENS = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"]
PAD_ID, EOS_ID = 0, 4
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{% if m['role'] == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class WarmStart:
    """Supervised steps of one task."""

    num_steps: int
    batch_size: int
    noise: float = 0.0
    """share of answers that are well formed but random"""
    lr: float = 1e-3


WARM_STARTS = {
    "add": WarmStart(num_steps=70, batch_size=128),
    "reverse": WarmStart(num_steps=130, batch_size=128),
    "guess": WarmStart(num_steps=60, batch_size=64, noise=0.5),
}


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and 5 special tokens, no merges: 261 ids, any UTF-8 round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(SPECIAL_TOKENS + alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL_TOKENS[PAD_ID],
        eos_token=SPECIAL_TOKENS[EOS_ID],
        padding_side="left",
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def tiny_config() -> LlamaConfig:
    """Width 128, ffn 384, 2 layers, 4 heads over 2 key heads, tied embeddings, context 512."""
    return LlamaConfig(
        vocab_size=261,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )


def make_tiny(folder: Path, task: str = "add", seed: int = 0, *, progress: bool = False) -> Path:
    """Build, warm-start and save the tiny model; an existing complete folder is left as it is.

    Raises:
        KeyError: for an unknown task.
    """
    if (folder / "config.json").is_file():
        return folder
    recipe = WARM_STARTS[task]
    tokenizer = byte_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config()
        config._attn_implementation = IMPLEMENTATION
        model = LlamaForCausalLM(config)
        _warm_start(model, tokenizer, task, recipe, seed, progress=progress)
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    rename_dir(part, folder)
    return folder


def _warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: str,
    recipe: WarmStart,
    seed: int,
    *,
    progress: bool,
) -> None:
    transcripts = examples(task, recipe.num_steps * recipe.batch_size, seed, noise=recipe.noise)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=0.0)
    for step in range(recipe.num_steps):
        batch = [_tokenize(next(transcripts), tokenizer) for _ in range(recipe.batch_size)]
        layout = PackedLayout.of([len(ids) for ids, _ in batch])
        token_ids = torch.cat([ids for ids, _ in batch])
        positions = torch.cat([mask for _, mask in batch]).nonzero().flatten()
        logits = packed_logits(model, token_ids, layout, positions - 1)
        loss = cross_entropy(logits.float(), token_ids[positions])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if progress and (step + 1) % 10 == 0:
            print(
                f"  warm start of tiny:{task}: step {step + 1}/{recipe.num_steps}, loss {loss.item():.3f}", flush=True
            )


def _tokenize(segments: list[Segment], tokenizer: PreTrainedTokenizerFast) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids [T] and the mask [T] of what the model says, an end token after each of its segments."""
    ids: list[int] = []
    mask: list[bool] = []
    for text, is_model in segments:
        own = [int(i) for i in tokenizer.encode(text, add_special_tokens=False)] + ([EOS_ID] if is_model else [])
        ids += own
        mask += [is_model] * len(own)
    return torch.tensor(ids), torch.tensor(mask)


def main() -> None:
    """Command line of the child process that makes the model before a run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="folder to make")
    parser.add_argument(
        "--task", default="add", choices=sorted(WARM_STARTS), help="task of the warm start (default: add)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and the examples (default: 0)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if (args.folder / "config.json").is_file():
        print(f"{args.folder} exists already")
        sys.exit(0)
    make_tiny(args.folder, args.task, args.seed, progress=True)
    print(f"made {args.folder}")


if __name__ == "__main__":
    main()
