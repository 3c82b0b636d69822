"""Profiles: what each device did while the work ran, in seconds of compute, of each collective, and idle.

`profiled` records a trace with `jax.profiler` (open it in XProf or Perfetto), `summarize` reads it back and `render`
prints it.
"""

from jaxpar.profile.record import check_writable, profiled
from jaxpar.profile.render import render
from jaxpar.profile.summary import DeviceTime, ProfileSummary, summarize
from jaxpar.profile.trace import Collective

__all__ = ["Collective", "DeviceTime", "ProfileSummary", "check_writable", "profiled", "render", "summarize"]
