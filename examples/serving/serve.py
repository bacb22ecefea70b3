# SPDX-License-Identifier: Apache-2.0
"""Returns scores of the newest published model. It needs `pip install "fleetlight[serve]"`.

python examples/serving/serve.py --out shared
curl localhost:8000/score -d '{"numbers": [[0, ...13]], "ids": [[1, ...26]]}'
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

import fleetlight as fleet
from fleetlight.errors import ConfigError
from fleetlight.serve import Reader


def application(out: Path, wait_s: float) -> Starlette:
    reader = Reader(out / "rows", wait_s=wait_s)
    model = fleet.load_inference_model(out / "program", reader=reader)

    async def score(request: Request) -> JSONResponse:
        try:
            asked = await request.json()
            numbers = torch.tensor(asked["numbers"], dtype=torch.float32)
            ids = torch.tensor(asked["ids"], dtype=torch.int64)
            scores = await run_in_threadpool(model, numbers, ids)
        except (ValueError, TypeError, KeyError, ConfigError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, status_code=400)
        return JSONResponse({"scores": scores.tolist(), "publication": reader.number})

    async def health(request: Request) -> JSONResponse:
        about = {"age_s": reader.age_s, "step": reader.step, "publication": reader.number}
        return JSONResponse({**about, "error": str(reader.error or "")})

    return Starlette(routes=[Route("/score", score, methods=["POST"]), Route("/health", health)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shared"), help="written by train.py")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--wait_s", type=float, default=300.0, help="for the first publication")
    args = parser.parse_args()
    uvicorn.run(application(args.out, args.wait_s), port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
