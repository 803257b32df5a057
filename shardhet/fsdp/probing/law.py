"""What makes a model exact however its batch is cut, and what is said if a part of it does not.

A refusal says who breaks the law, what was found, what is needed and one thing to do.
docs/limits.md lists usual causes.
"""

from enum import Enum
from typing import Any


class Refusal(BaseException):
    """Carries ``error`` past the model's own ``except`` clauses."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Law(Enum):
    """What is needed, and what to do."""

    APART = (
        "needs one row per sample, the same whichever other samples are with it",
        "Mix samples inside a unit, name the dimension that holds them "
        "(HetFSDP(batch_dim=...)), or let one rank compute all samples at once",
    )
    ADDS_UP = (
        "a number without samples must be the sum, or the mean, of those of parts of a batch",
        "Return what belongs to each sample, a sum, or a count as it is, which may be zero, "
        "in a tensor (torch.tensor(len(x), device=x.device) for len(x)); "
        "leave out a load-balancing loss (output_router_logits=False), or let one rank compute "
        "all samples at once",
    )
    GRADIENTS = (
        "gradients must be sums over samples, and grow as the loss does, which rounds and "
        "stages divide at the end",
        "Leave out the hook of a tensor or module, the autograd.Function or the option that "
        "mixes samples or clips (model.clip_grad_norm_ clips after backward), or let one rank "
        "compute all samples at once, in one round without stages",
    )
    REPEATS = (
        "each rank, microbatch and recomputation runs it once more, and must find and leave "
        "everything as in one process",
        "Compute it from each sample, pass it to the unit as an argument, count calls in a "
        "plain number that nothing depends on, and draw by torch inside a unit (nn.Dropout), "
        "or leave that out (layerdrop=0.0)",
    )
    PASSED = (
        "a microbatch sees only what are arguments and results of its unit, and gradients "
        "flow through them alone",
        "Pass it to the unit's forward, read a parameter from its module there "
        "(self.layer.weight), and return what is used outside instead of keeping it in an "
        "attribute, a KV cache or a hook (output_attentions=False, config.use_cache=False)",
    )
    READ = (
        "parameters and results are copies there, which may be read and not written",
        "Make a new tensor (x = x + y for x += y), leave out what writes in forward (max_norm "
        "of an embedding), and write this rank's rows between steps (with torch.no_grad(): "
        "for param in model.parameters(): ...)",
    )

    ALIKE = (
        "all microbatches and steps have to be as when the model was first called in this way",
        "Let it depend on the batch in the same way, call units in the same order and equally "
        "often, return one row for each sample or compute outside of units what is of all, or "
        "let a flag (True or False) among the model's attributes or arguments choose",
    )

    def error(self, found: str, kind: Any = ValueError) -> Exception:
        """What is said of what was ``found``."""
        needed, advice = self.value
        error: Exception = kind(f"{found}, but {needed}. {advice}.")
        return error

    def refusal(self, found: str, kind: Any = ValueError) -> Refusal:
        """To be raised past the model's own ``except`` clauses."""
        return Refusal(self.error(found, kind))


# Sentences of their own.

CACHED = (
    "model(...): with a KV cache (config.use_cache=True) it computes something else than "
    "without, for instance for position_ids that begin anew within a row: without a cache "
    "they mean packed sequences that do not see each other. HetFSDP trains without caches. Say "
    "that you mean it, for plain PyTorch too: model.config.use_cache = False before wrapping; "
    "or leave out the argument that makes the difference."
)
UNFORESEEN = (
    "{} of a kind that no probe can foresee, so it cannot be shown that samples do not mix "
    "({}) Draw them with torch.rand, randn, randint, bernoulli, multinomial or dropout."
)
DRAWS = "model(...): it draws from {}, and what it computes depends on that"
KEPT = (
    "model(...): a forward keeps values of its samples for the next one (attribute {}), and "
    "computes with them"
)
