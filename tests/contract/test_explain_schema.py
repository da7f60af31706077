"""``plan --explain-command --json`` against its JSON Schema."""

from __future__ import annotations

import pytest

from tests.contract.test_json_schemas import validate
from v100ctl.catalog import load_catalog
from v100ctl.plan.explain import Card, explain
from v100ctl.plan.explain.report import exit_code, explain_document

TEXTS = {
    "CUDA_VISIBLE_DEVICES=0 sudo llama-server -m /m -fa --cache-type-k q8_0 --api-key x --host 0.0.0.0": 1,
    "llama-server \u2013m “/m” -np 2 -c 4096 --no-mmap": 1,
    "vllm serve m-AWQ --rope-scaling yarn --sparsity 0.3 --enforce-eager False": 1,
    "docker run vllm/vllm-openai:latest --model m": 1,
    "cmake -B build -DLLAMA_CUDA=ON && cmake --build build -j": 2,
    "llama-server -m /m -ngl 99\n\n# then\nvllm serve m --dtype half --host ::1": 0,
}


@pytest.mark.parametrize("text", TEXTS)
def test_explain(text: str) -> None:
    catalog = load_catalog()
    card = Card("V100-SXM2-16GB", "7.0", "asked")
    found = explain(text, catalog, llama_cpp_build=11434, vllm_version="0.8.5.post1", card=card)
    validate(explain_document(found), "explain")
    assert exit_code(found) == TEXTS[text]
