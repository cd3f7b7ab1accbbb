"""A graph of agents over shared documents: each document is computed once, every agent goes on from its KV state.

    pipeline = Pipeline(model, {
        "contract": PrefillNode(text),
        "risks": BranchNode("List the risks.", "contract"),
        "dates": BranchNode("Which dates are named?", "contract", required_prefix_tokens=512),
        "report": BranchNode("Sum up. Dates: {dates}", ["risks", "dates"]),     # goes on from where "risks" has ended
    })
    result = pipeline.run()
    result["report"].text

================  ======================================================================================
`nodes`           what a pipeline is made of
`plan`            what it is going to need, and all that is wrong with it
`orchestrator`    starts each node when what it waits for is there
`shared`          branches in one context, decoding in one batch
`isolated`        branches in contexts of their own
`workers`         plain Python functions
`results`         what came of it, and where the time went
`definition`      a pipeline as it is given: checked, sized
`run`             one at work
================  ======================================================================================
"""

from .definition import Pipeline
from .nodes import BranchNode, FunctionNode, Node, PrefillNode
from .results import NodeResult, PipelineResult
from .run import Run

__all__ = ["BranchNode", "FunctionNode", "Node", "NodeResult", "Pipeline", "PipelineResult", "PrefillNode", "Run"]
