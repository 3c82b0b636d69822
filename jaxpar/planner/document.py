"""What a search found as plain data, for --json."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from jaxpar.plan import Plan
from jaxpar.planner.estimate import Estimate
from jaxpar.planner.pareto import front
from jaxpar.planner.render import assumed_values
from jaxpar.planner.search import Found
from jaxpar.planner.shares import decode_parts, prefill_parts
from jaxpar.planner.verdict import miss_of


def found_json(found: Found) -> dict[str, Any]:
    """The question, how far the search went, the front, and what is missed if anything."""
    asked, miss = found.question, miss_of(found)
    return {
        "cluster": asdict(asked.cluster),
        "workload": asdict(asked.workload),
        "targets": asdict(asked.targets),
        "objective": asked.objective,
        "assumptions": assumed_values(asked),
        "space": found.space,
        "looked_at": found.looked_at,
        "steps": found.steps,
        "met": found.met,
        "miss": None if miss is None else asdict(miss) | {"by": miss.by},
        "front": [
            {
                "pools": [plan_json(pool.plan) for pool in one.pools],
                "requests": one.batch,
                "tokens_per_second_per_device": one.tokens_per_device,
                "tokens_per_second_per_user": one.tokens_per_user,
            }
            for one in front(one for one in found.seen if one.fits)
        ],
    }


def estimate_json(one: Estimate) -> dict[str, Any]:
    """Times in seconds, sizes in bytes."""
    return {
        "pools": [
            {
                "plan": plan_json(pool.plan),
                "devices": pool.devices,
                "requests": pool.batch,
                "memory": pool.memory.items | {"all": pool.memory.total, "device": pool.memory.device_bytes},
                "largest": pool.memory.largest,
            }
            for pool in one.pools
        ],
        "fits": one.fits,
        "ttft": one.ttft,
        "ttft_parts": asdict(one.served.first),
        "tpot": one.tpot,
        "latency": one.latency,
        "requests_per_second": one.served.rate,
        "tokens_per_second": one.tokens_per_second,
        "tokens_per_second_per_device": one.tokens_per_device,
        "tokens_per_second_per_user": one.tokens_per_user,
        "device_seconds_per_token": one.device_seconds,
        "prefill_seconds": prefill_parts(one),
        "decode_seconds": decode_parts(one),
        "bound": one.decode.step.bound,
    }


def plan_json(plan: Plan) -> dict[str, Any]:
    """The fields of a plan; its mesh as axis sizes."""
    document = asdict(plan)
    return document | {"mesh": plan.mesh.sizes}
