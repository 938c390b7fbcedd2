"""Context parallel attention: one sequence over several ranks, with every option of one device."""

from tilewise.distributed.balance import balanced
from tilewise.distributed.context_parallel import (
    context_parallel_attention,
    context_parallel_attention_varlen,
    explain,
)
from tilewise.distributed.layouts import Layout
from tilewise.distributed.schedules import ScheduleExplanation
from tilewise.distributed.sharding import positions, shard, unshard

__all__ = ["Layout", "ScheduleExplanation", "balanced", "context_parallel_attention",
           "context_parallel_attention_varlen", "explain", "positions", "shard", "unshard"]
