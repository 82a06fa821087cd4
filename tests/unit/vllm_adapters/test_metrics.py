"""vLLM's metrics page: the figures routing needs, from pages as engines really write them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_adapters.metrics import EngineFigures, NotMetrics, parse_metrics

ENGINE = """\
vllm:num_requests_running{{engine="{engine}",model_name="tiny"}} {running}
vllm:num_requests_waiting{{engine="{engine}",model_name="tiny"}} {waiting}
vllm:num_requests_waiting_by_reason{{engine="{engine}",model_name="tiny",reason="capacity"}} 77.0
vllm:kv_cache_usage_perc{{engine="{engine}",model_name="tiny"}} {kv_used}
vllm:prefix_cache_queries_total{{engine="{engine}",model_name="tiny"}} {queries}
vllm:prefix_cache_queries_created{{engine="{engine}",model_name="tiny"}} 1.78e+09
vllm:prefix_cache_hits_total{{engine="{engine}",model_name="tiny"}} {hits}
vllm:external_prefix_cache_queries_total{{engine="{engine}",model_name="tiny"}} 999.0
vllm:external_prefix_cache_hits_total{{engine="{engine}",model_name="tiny"}} 999.0
vllm:cache_config_info{{block_size="32",num_gpu_blocks="2048",kv_cache_size_tokens="65536",\
kv_cache_max_concurrency="16.0",enable_prefix_caching="True",hash_block_size="None",engine="{engine}"}} 1.0
"""
PAGE = """\
# HELP python_gc_objects_collected_total Objects collected during gc
# TYPE python_gc_objects_collected_total counter
python_gc_objects_collected_total{generation="0"} 10290.0
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds 1.78501234567e+09
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
"""
LINES = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 2.0\n"


def engine(number: int, running: str, waiting: str, kv_used: str, queries: str = "0.0", hits: str = "0.0") -> str:
    """One engine's lines."""
    return ENGINE.format(engine=number, running=running, waiting=waiting, kv_used=kv_used, queries=queries, hits=hits)


def test_one_engines_page_is_read() -> None:
    """Every figure, exponents included, with look-alike names around them."""
    page = PAGE + engine(0, "3.0", "5.0", "0.25", "1.5e+06", "1.2e+06")
    assert parse_metrics(page.encode()) == EngineFigures(
        waiting=5.0,
        running=3.0,
        kv_used=0.25,
        kv_capacity_tokens=65_536,
        prefix_queries_tokens=1.5e6,
        prefix_hits_tokens=1.2e6,
        started_at_s=1.78501234567e9,
    )


def test_data_parallel_engines_are_one_endpoint() -> None:
    """Counts, counters and capacities add up; the share of KV in use is their mean."""
    page = PAGE + engine(0, "3.0", "5.0", "0.25", "100.0", "50.0") + engine(1, "1.0", "0.0", "0.75", "300.0", "10.0")
    figures = parse_metrics(page.encode())
    assert (figures.running, figures.waiting, figures.kv_used) == (4.0, 5.0, 0.5)
    assert figures.kv_capacity_tokens == 131_072
    assert (figures.prefix_queries_tokens, figures.prefix_hits_tokens) == (400.0, 60.0)


def test_the_older_name_of_the_kv_usage_is_understood() -> None:
    """Before vLLM 0.10 it was `gpu_cache_usage_perc`."""
    assert parse_metrics(LINES + b'vllm:gpu_cache_usage_perc{model_name="m"} 0.5\n').kv_used == 0.5


def test_what_is_not_reported_is_none() -> None:
    """Not zero: a scorer must be able to tell."""
    assert parse_metrics(LINES) == EngineFigures(waiting=2.0, running=1.0)


@pytest.mark.parametrize(
    ("labels", "tokens"),
    [
        ('block_size="16",num_gpu_blocks="1000"', 16_000),
        ('block_size="16",num_gpu_blocks="1000",kv_cache_size_tokens="None"', 16_000),
        ('block_size="16",num_gpu_blocks="1000",kv_cache_size_tokens="15990"', 15_990),
        ('block_size="16",num_gpu_blocks="None"', None),
        ('block_size="16"', None),
        ('kv_cache_size_tokens="lots"', None),
        ('kv_cache_size_tokens="-1"', None),
        ('kv_cache_size_tokens="0"', None),
        (f'kv_cache_size_tokens="{"9" * 400}"', None),
        ('block_size="-16",num_gpu_blocks="1000"', None),
        ("", None),
    ],
)
def test_the_capacity_is_the_engines_own_figure_else_blocks(labels: str, tokens: int | None) -> None:
    """Blocks times their size where the engine does not say; None where it says neither."""
    page = LINES + f"vllm:cache_config_info{{{labels}}} 1.0\n".encode()
    assert parse_metrics(page).kv_capacity_tokens == tokens


def test_a_model_name_with_braces_and_spaces_does_not_confuse() -> None:
    """Label values are free text."""
    page = b'vllm:num_requests_running{model_name="a {b} c"} 4.0\nvllm:num_requests_waiting{model_name="}"} 1.0\n'
    figures = parse_metrics(page)
    assert (figures.running, figures.waiting) == (4.0, 1.0)


def test_a_time_stamp_behind_the_value_is_not_the_value() -> None:
    """Prometheus' text form allows one."""
    page = b"vllm:num_requests_running 4.0 1785012345000\nvllm:num_requests_waiting 1.0 1785012345000\n"
    assert parse_metrics(page).running == 4.0


@pytest.mark.parametrize("value", ["NaN", "nan", "+Inf", "-Inf", "-1.0", "x", "1,5"])
def test_a_figure_that_is_no_count_is_not_reported(value: str) -> None:
    """One NaN would make every score NaN."""
    assert parse_metrics(LINES + f"vllm:kv_cache_usage_perc {value}\n".encode()).kv_used is None
    with pytest.raises(NotMetrics):
        parse_metrics(f"vllm:num_requests_running {value}\nvllm:num_requests_waiting 1.0\n".encode())


@pytest.mark.parametrize(
    "page",
    [
        b"",
        b"<html>not found</html>",
        b"# HELP vllm:num_requests_running x\n# HELP vllm:num_requests_waiting x\n",
        b"process_start_time_seconds 1.0\nprocess_cpu_seconds_total 2.0\n",
        b"vllm:num_requests_running 1.0\n",
        b"vllm:num_requests_waiting 1.0\n",
        b" vllm:num_requests_running 1.0 vllm:num_requests_waiting 1.0",
        b'{"vllm:num_requests_running": 1.0}',
    ],
)
def test_another_page_is_not_metrics(page: bytes) -> None:
    """Empty, HTML, comments only, another exporter's, half of it."""
    with pytest.raises(NotMetrics, match="vllm:num_requests_running"):
        parse_metrics(page)


@settings(deadline=None)
@given(st.binary(max_size=300))
def test_no_page_raises_anything_else(page: bytes) -> None:
    """Whatever an endpoint serves there."""
    figures = parse_metrics(LINES + page)
    assert figures.running is not None
    assert figures.waiting is not None


@settings(deadline=None)
@given(st.sampled_from(["running", "waiting"]), st.floats() | st.integers() | st.text())
def test_no_value_reaches_the_scorers_that_is_no_count(name: str, value: object) -> None:
    """Whatever an engine writes there: figures are finite and not negative."""
    figures = parse_metrics(LINES + f"vllm:num_requests_{name} {value}\n".encode())
    assert figures.running is not None
    assert figures.waiting is not None
    assert 0 <= figures.running < float("inf")
    assert 0 <= figures.waiting < float("inf")


def test_figures_too_large_to_be_summed_are_not_believed() -> None:
    """Each line is finite; the sum of two would not be."""
    figures = parse_metrics(LINES + b"vllm:num_requests_running 1.7e308\n" * 2)
    assert figures.running == parse_metrics(LINES).running


def test_a_cache_is_never_more_than_full() -> None:
    """Whatever the page says: policies and alarms go by shares."""
    assert parse_metrics(LINES + b"vllm:kv_cache_usage_perc 1e18\n").kv_used == 1.0


def test_labels_without_end_are_read_in_one_go() -> None:
    """A page made to be slow: 2 MB of word characters where labels should be. A general pattern would not end."""
    page = (
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:cache_config_info{"
        + b"a" * 2_000_000
        + b"} 1\n"
    )
    figures = parse_metrics(page)
    assert (figures.running, figures.waiting, figures.kv_capacity_tokens) == (1, 2, None)


def test_two_negatives_make_no_capacity() -> None:
    """Their product would look like one."""
    page = (
        b"vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"
        b'vllm:cache_config_info{block_size="-16",num_gpu_blocks="-5"} 1\n'
    )
    assert parse_metrics(page).kv_capacity_tokens is None


def _adapters(running: str, waiting: str, value: float, most: str = "2") -> bytes:
    labels = f'max_lora="{most}",running_lora_adapters="{running}",waiting_lora_adapters="{waiting}"'
    return f"vllm:lora_requests_info{{{labels}}} {value}\n".encode()


def test_the_newest_line_tells_of_the_adapters() -> None:
    """Lines of earlier moments stay on the page; the value is the time."""
    page = LINES + _adapters("l1,l2", "l3", 1.79e9) + _adapters("l9", "", 1.78e9)
    read = parse_metrics(page)
    assert (read.running_adapters, read.waiting_adapters, read.max_adapters) == ({"l1", "l2"}, {"l3"}, 2)


@pytest.mark.parametrize("most", ["", "-1", "many", "9" * 400])
def test_adapters_without_a_sensible_bound_are_not_known(most: str) -> None:
    """What an engine cannot say, it does not say in part."""
    read = parse_metrics(LINES + _adapters("l1", "", 1.0, most))
    assert (read.running_adapters, read.max_adapters) == (frozenset(), None)


_LOADED = b"vllm:num_requests_running 1.0\nvllm:num_requests_waiting 0.0\n"


def test_a_page_names_the_port_where_the_plugin_pushes() -> None:
    """With the mark of the messages that come from there; a page without it names none."""
    figures = parse_metrics(_LOADED + b'pointsman_stats_port{run="0a1b"} 5560.0\n')
    assert (figures.stats_port, figures.stats_run) == (5560, "0a1b")
    figures = parse_metrics(_LOADED)
    assert (figures.stats_port, figures.stats_run) == (None, None)


@pytest.mark.parametrize(
    "lines",
    [
        b'pointsman_stats_port{pid="7",run="0a"} 5560.0\npointsman_stats_port{pid="8",run="0b"} 5561.0\n',
        b'pointsman_stats_port{run="0a"} 5560.0\npointsman_stats_port{run="0b"} 5561.0\n',
        b'pointsman_stats_port{run="0a"} 0.0\n',
        b'pointsman_stats_port{run="0a"} 70000.0\n',
        b'pointsman_stats_port{run="0a"} 5.6.7\n',
    ],
)
def test_a_page_that_names_no_port_or_several_is_not_listened_for(lines: bytes) -> None:
    """Each of several API processes would push only part of the figures."""
    assert parse_metrics(_LOADED + lines).stats_port is None
