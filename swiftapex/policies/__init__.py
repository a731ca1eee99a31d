"""Policies by name. A new one needs no entry here: name it as `package.module:Class`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from swiftapex.core.errors import ConfigError
from swiftapex.core.plugins import check_arguments, check_class, load_class

if TYPE_CHECKING:
    from swiftapex.config.load import RunPlan
    from swiftapex.policies.base import Policy

POLICIES: dict[str, str] = {
    "gpu_only": "swiftapex.policies.gpu_only:GpuOnly",
    "neo": "swiftapex.policies.neo:Neo",
    "apex": "swiftapex.policies.apex:Apex",
    "fastdecode": "swiftapex.policies.fastdecode:FastDecode",
    "rho": "swiftapex.policies.rho:Rho",
    "model_based": "swiftapex.policies.model_based:ModelBased",
}
FIXED_PREFIX = "fixed:"


def make_policy(name: str, args: Mapping[str, Any] | None = None) -> Policy:
    """The policy `name` (`fixed:<pipeline>` and dotted paths included), built with `args`."""
    args, asked = dict(args or {}), dict(args or {})
    shown = name
    if name.startswith(FIXED_PREFIX):
        args["pipeline"] = name.removeprefix(FIXED_PREFIX)
        name = "swiftapex.policies.fixed:Fixed"
    policy_class = load_class("policy", name, POLICIES)
    check_class("policy", shown, policy_class, "plan", "swiftapex.policies.base.Policy")
    try:
        inspect.signature(policy_class).bind(**args)
    except TypeError as error:
        known = [p for p in inspect.signature(policy_class).parameters if p != "pipeline"]
        takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
        raise ConfigError(f"policy {shown!r} does not take {asked}: {takes}") from error
    check_arguments(policy_class, args, f"policy {shown!r}")
    try:
        return policy_class(**args)  # type: ignore[no-any-return]
    except TypeError as error:
        raise ConfigError(f"policy {shown!r} cannot be made of {asked}: {error}") from error


def run_uses_cpu(run: RunPlan) -> bool:
    """Whether the policy of a run, which is none of another engine, uses the CPU side."""
    return make_policy(run.policy, run.policy_args).uses_cpu
