"""`python -m pageferry.decode_worker.main`: run one decode worker."""

from __future__ import annotations

from pageferry.decode_worker.worker import DecodeWorker
from pageferry.kvtransfer.settings import DecodeSettings
from pageferry.kvtransfer.worker_main import main

if __name__ == "__main__":
    main("decode", DecodeSettings, DecodeWorker)
