"""What hardware there is: one record per device."""

from dataclasses import asdict, dataclass
from typing import Any, Self

MEMORY_TOLERANCE = 0.02  # drivers of different versions reserve different amounts


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """What is known of one device; ``None`` means "not stated" and fits anything."""

    host: str | None = None  # name of the node
    kind: str | None = None  # "NVIDIA A100-SXM4-80GB", as the driver spells it
    memory_capacity_bytes: int | None = None
    uuid: str | None = None  # of this very card

    def accepts(self, found: "DeviceSpec") -> bool:
        """Whether a device announced as ``found`` may play the part described by ``self``."""
        wanted_bytes = self.memory_capacity_bytes or 0
        return (
            self.host in (None, found.host)
            and self.kind in (None, found.kind)
            and self.uuid in (None, found.uuid)
            and (found.memory_capacity_bytes or 0) >= (1 - MEMORY_TOLERANCE) * wanted_bytes
        )

    def __str__(self) -> str:
        parts = [self.kind or "any device"]
        if self.memory_capacity_bytes is not None:
            parts.append(f"{self.memory_capacity_bytes / 2**30:.1f} GiB")
        if self.host is not None:
            parts.append(f"on {self.host}")
        if self.uuid is not None:
            parts.append(f"({self.uuid})")
        return " ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Only what is stated, ready for JSON."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, stated: dict[str, Any]) -> Self:
        """The inverse of ``to_dict``; raises ``ValueError`` naming the key that is wrong."""
        types = {"host": str, "kind": str, "memory_capacity_bytes": int, "uuid": str}
        for key, value in stated.items():
            if key not in types:
                raise ValueError(
                    f"device: unknown key {key!r}; known keys are {', '.join(types)}."
                )
            if value is not None and type(value) is not types[key]:
                raise ValueError(
                    f"device: {key} is {value!r} but must be {types[key].__name__}."
                )
        if (stated.get("memory_capacity_bytes") or 0) < 0:
            raise ValueError(
                f"device: memory_capacity_bytes is {stated['memory_capacity_bytes']} but must "
                f"be at least 0."
            )
        return cls(**stated)
