"""Prefill and decode as two real `vllm serve` processes with our router in front."""

from headwater.lab.campaigns import vllm_pd


def test_two_vllm_servers_answer_as_one() -> None:
    found = vllm_pd.run(requests=8, kills=0)
    assert found["ok"], found
    assert found["apart"]["right"] == 8
    assert found["loaded_tokens"] >= 32
