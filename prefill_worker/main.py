"""`python -m pageferry.prefill_worker.main`: run one prefill worker."""

from __future__ import annotations

from pageferry.kvtransfer.settings import PrefillSettings
from pageferry.kvtransfer.worker_main import main
from pageferry.prefill_worker.worker import PrefillWorker

if __name__ == "__main__":
    main("prefill", PrefillSettings, PrefillWorker)
