"""The inference process of the local engine: load the model, serve vLLM's routes, end on a signal.

Notable:
- In a run it is started with `--run-dir RUN_DIR`; for trials and tests `--model DIR` serves any Hugging Face folder.
- In a run it listens on its node's address, and beyond loopback asks for the run's token, as the routes can pause the
  engine and load files. A trial listens on loopback.
- When the engine thread fails, the error is raised here, in the main thread, and ends the process with its exit code.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from aiohttp import web
from loguru import logger
from transformers import PreTrainedModel

from services.config.context import load_run
from services.config.listener import url_of
from services.inference.local_engine import LocalEngine
from services.inference.local_request import EngineRequest
from services.inference.local_routes import LocalServer
from services.model.load import load_causal_lm
from services.runtime.auth import Token, check_listener, run_token
from services.runtime.lifecycle import die_with_parent, install_stop_handlers, leave, run_process


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What one local engine serves, and how."""

    model_dir: Path
    model_init: str = "pretrained"
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    host: str = "127.0.0.1"
    port: int = 0
    token: Token | None = None
    max_model_len: int = 512
    max_num_seqs: int = 64
    tell_versions: bool = True


def serve(options: ServerOptions) -> None:
    """Load, serve until a stop signal, and clean up.

    Raises:
        ConfigError: the model cannot be loaded or decoded, or the address is beyond loopback without a token.
        Exception: whatever ended the engine thread.
    """
    check_listener(options.host, f"local engine at {options.host}", is_guarded=options.token is not None)
    model = load_causal_lm(options.model_dir, init=options.model_init, seed=options.seed, dtype=options.dtype)
    asyncio.run(_serve(options, model.to(options.device)))  # pyright: ignore[reportArgumentType]


async def _serve(options: ServerOptions, model: PreTrainedModel) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def hand_over(finished: list[EngineRequest]) -> None:
        for request in finished:
            if not request.waiter.done():
                request.waiter.set_result(None)

    engine = LocalEngine(
        model,
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        deliver=lambda finished: loop.call_soon_threadsafe(hand_over, finished) and None,
        on_failure=lambda _: loop.call_soon_threadsafe(ended.set) and None,
    )
    install_stop_handlers(lambda: loop.call_soon_threadsafe(ended.set) and None)
    engine.start()
    server = LocalServer(
        engine,
        eos_token_ids=_eos_token_ids(model),
        vocab_size=int(model.get_input_embeddings().weight.shape[0]),  # pyright: ignore[reportIndexIssue, reportArgumentType]
        tell_versions=options.tell_versions,
        token=options.token,
    )
    # A caller that goes away cancels its handler, which frees its slot.
    runner = web.AppRunner(server.app(), access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, options.host, options.port, backlog=2048)
    await site.start()
    url = url_of(options.host, runner.addresses[0][1])
    logger.info("the local engine listens on {}", url)
    sys.stdout.write(f"listening on {url}\n")
    sys.stdout.flush()
    await ended.wait()
    if engine.failure is not None:
        raise engine.failure
    await asyncio.to_thread(engine.stop)
    await runner.cleanup()


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The model's own end-of-sequence ids: of its generation config, else of its config."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = getattr(model.config, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


def _run_options(run_dir: Path, engine_index: int) -> ServerOptions:
    config, context = load_run(run_dir)
    address = urlsplit(context.inference_urls[engine_index])
    return ServerOptions(
        model_dir=Path(context.model_dir),
        model_init=context.model_init,
        seed=config.seed,
        dtype=config.model.dtype,
        device=config.deployment.device,
        host=address.hostname or "",
        port=address.port or 0,
        token=run_token(context.token_file),
        max_model_len=config.inference.max_model_len,
        max_num_seqs=config.inference.max_num_seqs,
    )


def main() -> None:
    """Parse the command line and serve."""
    parser = argparse.ArgumentParser(prog="python -m services.inference.local_server", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--run-dir", type=Path, help="run directory; everything comes from its configuration")
    source.add_argument("--model", type=Path, help="Hugging Face folder to serve by itself")
    parser.add_argument("--engine-index", type=int, help="with --run-dir: which of the run's several engines this is")
    parser.add_argument("--port", type=int, default=0, help="with --model: port on loopback, 0 = any")
    parser.add_argument("--max-model-len", type=int, default=512, help="with --model: tokens of the longest sequence")
    parser.add_argument("--max-num-seqs", type=int, default=64, help="with --model: sequences decoded together")
    parser.add_argument("--no-weight-versions", action="store_true", help="with --model: answer without version spans")
    args = parser.parse_args()
    if args.run_dir is not None:
        name = "inference" if args.engine_index is None else f"inference-{args.engine_index}"
        run_process(name, args.run_dir, lambda: serve(_run_options(args.run_dir, args.engine_index or 0)))
    die_with_parent()
    serve(
        ServerOptions(
            model_dir=args.model,
            port=args.port,
            max_model_len=args.max_model_len,
            max_num_seqs=args.max_num_seqs,
            tell_versions=not args.no_weight_versions,
        )
    )
    leave()  # with torch loaded, the interpreter's own clean-up takes seconds


if __name__ == "__main__":
    main()
