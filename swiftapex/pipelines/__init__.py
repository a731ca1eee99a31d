"""Pipelines by name. A new one needs no entry here: name it as `package.module:Class`."""

PIPELINES: dict[str, str] = {
    "sequential": "swiftapex.pipelines.sequential:Sequential",
    "asymmetric": "swiftapex.pipelines.asymmetric:Asymmetric",
    "async_overlap": "swiftapex.pipelines.async_overlap:AsyncOverlap",
    "symmetric": "swiftapex.pipelines.symmetric:Symmetric",
}
