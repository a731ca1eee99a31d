"""Pipelines by name. A new one needs no entry here: name it as `package.module:Class`."""

PIPELINES: dict[str, str] = {
    "sequential": "swiftapex.pipelines.sequential:Sequential",
}
