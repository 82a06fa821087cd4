"""The metrics pages of engines and releases: each is recognised by itself, and means the same figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_adapters.families import DIALECTS, VLLM, Dialect
from vllm_adapters.metrics import EngineFigures, EngineLoad, NotMetrics, _Lines, parse_metrics

V0 = b"""\
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:num_requests_swapped{model_name="m"} 1.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:cpu_cache_usage_perc{model_name="m"} 0.9
vllm:gpu_prefix_cache_hit_rate{model_name="m"} 0.25
vllm:num_preemptions_total{model_name="m"} 4.0
vllm:prompt_tokens_total{model_name="m"} 700.0
vllm:generation_tokens_total{model_name="m"} 70.0
vllm:request_success_total{finished_reason="stop",model_name="m"} 5.0
vllm:request_success_total{finished_reason="length",model_name="m"} 6.0
vllm:cache_config_info{block_size="16",num_gpu_blocks="100"} 1.0
"""
V1_BEFORE_0_9 = b"""\
vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 0.0
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries_total{model_name="m"} 100.0
vllm:gpu_prefix_cache_hits_total{model_name="m"} 40.0
"""
SGLANG = b"""\
# HELP sglang:num_running_reqs The number of running requests.
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 3.0
sglang:num_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 5.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 77.0
sglang:token_usage{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.25
sglang:cache_hit_rate{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 0.6
sglang:max_total_num_tokens{engine_type="unified",model_name="m",pp_rank="0",tp_rank="0"} 65536.0
sglang:prompt_tokens_total{model_name="m"} 1000.0
sglang:cached_tokens_total{cache_source="device",model_name="m"} 300.0
sglang:cached_tokens_total{cache_source="host",model_name="m"} 100.0
sglang:generation_tokens_total{model_name="m"} 40.0
sglang:realtime_tokens_total{mode="prefill_compute",model_name="m"} 600.0
sglang:realtime_tokens_total{mode="decode",model_name="m"} 55.0
sglang:num_retracted_requests_total{model_name="m"} 2.0
"""
TRTLLM_SERVE = b"""\
trtllm_num_requests_running{engine_type="trtllm",model_name="m"} 3.0
trtllm_num_requests_waiting{engine_type="trtllm",model_name="m"} 5.0
trtllm_kv_cache_utilization{engine_type="trtllm",model_name="m"} 0.25
trtllm_kv_cache_hit_rate{engine_type="trtllm",model_name="m"} 0.6
trtllm_kv_cache_max_blocks{engine_type="trtllm",model_name="m"} 1024.0
trtllm_kv_cache_tokens_per_block{engine_type="trtllm",model_name="m"} 64.0
trtllm_prompt_tokens_total{engine_type="trtllm",model_name="m"} 1000.0
trtllm_prompt_cached_tokens_total{engine_type="trtllm",model_name="m"} 400.0
trtllm_request_success_total{engine_type="trtllm",finished_reason="cancelled",model_name="m"} 2.0
"""
TRITON = b"""\
nv_inference_request_success{model="tensorrt_llm",version="1"} 9
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="context",version="1"} 1
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="scheduled",version="1"} 3
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="max",version="1"} 512
nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="active",version="1"} 8
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="tokens_per",model="tensorrt_llm",version="1"} 64
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="used",model="tensorrt_llm",version="1"} 256
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="free",model="tensorrt_llm",version="1"} 768
nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="max",model="tensorrt_llm",version="1"} 1024
nv_trt_llm_general_metrics{general_type="iteration_counter",model="tensorrt_llm",version="1"} 44
nv_trt_llm_general_metrics{general_type="timestamp",model="tensorrt_llm",version="1"} 1700074049
"""


def test_vllm_v0_is_understood() -> None:
    """Swapped requests wait; its ratio of hits stands where counters do not."""
    assert parse_metrics(V0) == EngineFigures(
        waiting=3.0,
        running=3.0,
        kv_used=0.5,
        kv_capacity_tokens=1_600,
        hit_ratio=0.25,
        preemptions=4.0,
        prefilled_tokens=700.0,
        generated_tokens=70.0,
        finished={"stop": 5.0, "length": 6.0},
        progress=770.0,
    )


def test_counters_had_gpu_in_their_names_before() -> None:
    """Until vLLM 0.9."""
    figures = parse_metrics(V1_BEFORE_0_9)
    assert (figures.prefix_queries_tokens, figures.prefix_hits_tokens, figures.kv_used) == (100.0, 40.0, 0.5)


def test_of_two_names_on_one_page_the_newer_counts() -> None:
    """Engines that are asked to show hidden metrics write both: that is one cache, not two."""
    newer = b"vllm:prefix_cache_queries_total 60.0\nvllm:prefix_cache_hits_total 6.0\nvllm:kv_cache_usage_perc 0.75\n"
    figures = parse_metrics(V1_BEFORE_0_9 + newer)
    assert (figures.prefix_queries_tokens, figures.prefix_hits_tokens, figures.kv_used) == (60.0, 6.0, 0.75)


def test_counters_may_stand_without_their_ending() -> None:
    """As some exporters write them."""
    page = V1_BEFORE_0_9.replace(b"_total", b"")
    assert parse_metrics(page) == parse_metrics(V1_BEFORE_0_9)


def test_reasons_unknown_to_us_are_one() -> None:
    """The label of our own counter stays bounded whatever an engine writes."""
    page = V0 + b'vllm:request_success_total{finished_reason="x"} 1.0\nvllm:request_success_total 2.0\n'
    assert parse_metrics(page).finished == {"stop": 5.0, "length": 6.0, "other": 3.0}


def test_sglang_is_understood() -> None:
    """Cached tokens of all sources; generated ones by the counter that grows while they are generated."""
    assert parse_metrics(SGLANG) == EngineFigures(
        dialect="sglang",
        waiting=5.0,
        running=3.0,
        kv_used=0.25,
        kv_capacity_tokens=65_536,
        prefix_queries_tokens=1_000.0,
        prefix_hits_tokens=400.0,
        hit_ratio=0.6,
        prefilled_tokens=1_000.0,
        generated_tokens=55.0,
        preemptions=2.0,
    )


def test_ranks_of_one_sglang_engine_tell_the_same_requests() -> None:
    """Tensor-parallel ranks and the breakdown by priority repeat what the whole says; data-parallel ranks add up."""
    page = (
        b"".join(
            b'sglang:num_running_reqs{dp_rank="%d",priority="%s",tp_rank="%d"} %d\n' % line
            for line in [(0, b"", 0, 4), (0, b"", 1, 4), (0, b"1", 0, 3), (0, b"2", 0, 1), (1, b"", 2, 6)]
        )
        + b'sglang:num_queue_reqs{dp_rank="0"} 1\nsglang:num_queue_reqs{dp_rank="1"} 0\n'
    )
    figures = parse_metrics(page)
    assert (figures.running, figures.waiting) == (10.0, 1.0)
    assert figures.engines == (EngineLoad("0", 1.0, 4.0), EngineLoad("1", 0.0, 6.0))


def test_trtllm_serve_is_understood() -> None:
    """The cache's size as blocks times their size."""
    assert parse_metrics(TRTLLM_SERVE) == EngineFigures(
        dialect="trtllm-serve",
        waiting=5.0,
        running=3.0,
        kv_used=0.25,
        kv_capacity_tokens=65_536,
        prefix_queries_tokens=1_000.0,
        prefix_hits_tokens=400.0,
        hit_ratio=0.6,
        prefilled_tokens=1_000.0,
        finished={"other": 2.0},
    )


def test_its_names_of_before_are_understood() -> None:
    """Of the release that called the running ones active."""
    figures = parse_metrics(b"trtllm_num_active_requests 2.0\ntrtllm_server_queue_length 1.0\n")
    assert (figures.running, figures.waiting) == (2.0, 1.0)


def test_triton_is_understood() -> None:
    """One family, told apart by a label; who is active and not scheduled waits."""
    assert parse_metrics(TRITON) == EngineFigures(
        dialect="triton-trtllm", waiting=5.0, running=3.0, kv_used=0.25, kv_capacity_tokens=65_536, progress=44.0
    )


def test_newer_tritons_say_it_themselves() -> None:
    """Waiting requests and the share of the cache in use."""
    page = TRITON + (
        b'nv_trt_llm_request_metrics{model="tensorrt_llm",request_type="waiting",version="1"} 2\n'
        b'nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type="fraction",model="tensorrt_llm",version="1"} 0.75\n'
    )
    assert (parse_metrics(page).waiting, parse_metrics(page).kv_used) == (2.0, 0.75)


def test_each_data_parallel_engine_can_be_seen() -> None:
    """Beside the sums: a full one behind a half-empty whole. In order, 2 before 10."""
    page = b"".join(
        b'vllm:num_requests_running{engine="%d"} %d\nvllm:num_requests_waiting{engine="%d"} 0\n'
        b'vllm:kv_cache_usage_perc{engine="%d"} %s\n' % (engine, engine, engine, engine, kv_used)
        for engine, kv_used in [(10, b"1.0"), (2, b"0.5"), (1, b"0.0")]
    )
    figures = parse_metrics(page)
    assert figures.engines == (
        EngineLoad("1", 0.0, 1.0, 0.0),
        EngineLoad("2", 0.0, 2.0, 0.5),
        EngineLoad("10", 0.0, 10.0, 1.0),
    )
    assert (figures.running, figures.kv_used) == (13.0, 0.5)


def test_the_number_of_blocks_is_of_all_engines_together() -> None:
    """VLLM repeats their sum on each one's line; a size in tokens is one engine's."""
    loads = V1_BEFORE_0_9 + b"".join(
        b'vllm:cache_config_info{block_size="16",num_gpu_blocks="2000",engine="%d"%s} 1\n' % line
        for line in [(0, b""), (1, b"")]
    )
    assert parse_metrics(loads).kv_capacity_tokens == 32_000
    sizes = loads.replace(b'"} 1', b'",kv_cache_size_tokens="15000"} 1')
    assert parse_metrics(sizes).kv_capacity_tokens == 30_000


def test_a_single_engine_is_the_whole() -> None:
    """Nothing to tell apart."""
    assert parse_metrics(V1_BEFORE_0_9.replace(b"model_name", b"engine")).engines == ()


def test_a_page_of_ten_thousand_engines_is_not_kept() -> None:
    """What would be shown is bounded; the sums stand."""
    page = b"".join(b'vllm:num_requests_running{engine="%d"} 1\n' % engine for engine in range(10_000))
    figures = parse_metrics(page + b"vllm:num_requests_waiting 0\n")
    assert (figures.running, figures.engines) == (10_000.0, ())


def test_a_dialect_that_does_not_tell_its_load_is_passed_over() -> None:
    """A page may hold a family of another engine, of a translator before it for one."""
    assert parse_metrics(b"vllm:generation_tokens_total 1\n" + SGLANG).dialect == "sglang"


@pytest.mark.parametrize("dialect", DIALECTS, ids=lambda dialect: dialect.name)
def test_every_family_begins_as_its_dialect_is_known_by(dialect: Dialect) -> None:
    """Else it would never be found on a page."""
    names = [*dialect.labelled.values(), *(name for names in dialect.figures.values() for name in names)]
    assert all(name.startswith(dialect.prefix) for name in names)
    assert {"waiting", "running"} <= set(dialect.figures)


@given(st.sampled_from([SGLANG, TRTLLM_SERVE, TRITON, V0]), st.binary(max_size=200), st.integers(0, 400))
def test_no_broken_page_raises_anything_else(page: bytes, noise: bytes, at: int) -> None:
    """Noise in the middle of any dialect's page."""
    try:
        figures = parse_metrics(page[:at] + noise + page[at:])
    except NotMetrics:
        return
    assert 0 <= (figures.running or 0) < float("inf")
    assert 0 <= (figures.waiting or 0) < float("inf")


def test_only_a_dialect_that_has_them_tells_by_labels() -> None:
    """The names of vLLM's families stand in its table alone: another dialect may have its own, or none."""
    renamed = V0.replace(b"vllm:cache_config_info", b"vllm:cache_config")
    assert parse_metrics(V0).kv_capacity_tokens == 1_600
    assert parse_metrics(renamed).kv_capacity_tokens is None
    told = {"cache_config": "vllm:cache_config"}
    ours = Dialect(VLLM.name, VLLM.prefix, VLLM.engine_label, VLLM.figures, labelled=told)
    assert _Lines(ours, renamed).labelled("cache_config")[0][1] == 1.0
    assert _Lines(ours, V0).labelled("adapters") == []
