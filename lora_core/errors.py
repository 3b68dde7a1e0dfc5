"""The exceptions of this project, each raised once, at the edge where the fault is found.

    LoRAFleetError
    ├── InvalidRequest            a request that can never be served: malformed, out of range, too long
    ├── AdapterError
    │   ├── AdapterNotFound       no adapter has this name
    │   ├── AdapterNameTaken      the name belongs to another adapter, or to the base model
    │   ├── InvalidAdapterPath    nothing readable at this path
    │   ├── InvalidAdapter        files were found, and cannot be served exactly
    │   ├── AdapterLost           a loaded adapter's files are gone, changed or too slow when they are needed again
    │   ├── AdapterUnloaded       unloaded, and the request did not end within the drain's deadline
    │   ├── LoRADisabled          the server runs with `enable_lora: false`
    │   ├── GenerationTaken       a load names a generation that was given before (`lora_core.generations`)
    │   ├── PinRefused            another pin would leave no slot for the others (`lora_core.operator_pins`)
    │   └── NoFreeSlot            every slot is in use (`lora_core.slots`)
    ├── ConfigError               a setting that cannot work, found at start
    │   └── UnsupportedModel      the base model's architecture is not declared
    ├── ReplicaUnknown            the router actor does not know the replica that speaks; no client sees it
    ├── RouterReplaced            the router actor that was asked for a change is no longer the one to ask
    ├── AccessRefused             what a caller may not do
    │   ├── KeyRefused            no key, or one that nobody has
    │   └── NotPermitted          the key is right, and does not reach so far
    ├── TryLater                  the request is right and comes at a wrong time; says when to send it again
    │   ├── QueueFull             as many requests wait as may wait
    │   ├── AdapterLate           an adapter was not brought to a slot within the time a request waits for it
    │   ├── NoReplica             no replica came within the time a request waits for one
    │   └── RateLimited           a tenant is over one of its quotas
    └── EngineError
        ├── EngineDead            the engine process is gone or no longer makes progress
        │   └── EngineUnavailable it was so before the request reached it
        └── RequestTimeout        an answer did not come within its deadline

Every exception carries one string, a sentence its reader can act on, so that it crosses process boundaries unchanged;
those of `TryLater` a number besides.
"""


class LoRAFleetError(Exception):
    """Base of every exception this project raises on purpose."""


class InvalidRequest(LoRAFleetError, ValueError):
    """The request itself is wrong; sending it again unchanged cannot help."""


class AdapterError(LoRAFleetError):
    """An operation on an adapter was refused."""


class AdapterNotFound(AdapterError):
    """No adapter of this name is loaded."""


class AdapterNameTaken(AdapterError):
    """The name belongs to another adapter or to the base model."""


class InvalidAdapterPath(AdapterError, ValueError):
    """No adapter folder can be read at this path."""


class InvalidAdapter(AdapterError, ValueError):
    """The adapter's files cannot be served exactly; the message says which and why."""


class AdapterLost(AdapterError):
    """A loaded adapter cannot be had: its files are needed and are gone, changed, or too slow, or no slot takes it."""


class AdapterUnloaded(AdapterError):
    """The adapter was unloaded, and the request did not end before the drain's deadline."""


class LoRADisabled(AdapterError):
    """Adapters were asked of a server that runs with `enable_lora: false`."""


class ConfigError(LoRAFleetError, ValueError):
    """A setting that cannot work; the message names it, its value and what is allowed."""


class UnsupportedModel(ConfigError):
    """The base model's architecture is not one this server declares."""


class ReplicaUnknown(LoRAFleetError):
    """The router does not know this replica (its lease ran out, or the router restarted): register again."""


class RouterReplaced(LoRAFleetError):
    """A later router has opened this one's journal. Nothing was changed: ask that one."""


class AccessRefused(LoRAFleetError):
    """The caller may not do this; the message says what may."""


class KeyRefused(AccessRefused):
    """There is no key, or nobody has this one."""


class NotPermitted(AccessRefused):
    """The key is right and does not reach so far; the message says whose does."""


class TryLater(LoRAFleetError):
    """Nothing is wrong with the request: sent again after `retry_after_s` seconds it is likely to be answered.

    Args:
        message: The sentence.
        retry_after_s: Seconds after which it is worth trying again.
    """

    def __init__(self, message: str, retry_after_s: float) -> None:
        # Both, so that an unpickled copy is made with both.
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class QueueFull(TryLater):
    """As many requests wait as may wait, of one adapter or in total."""


class AdapterLate(TryLater):
    """An adapter was not in a slot within the time that a request waits for it."""


class NoReplica(TryLater):
    """No replica was there to take the request, and none came within the time that a request waits for one."""


class RateLimited(TryLater):
    """A tenant is over one of its quotas; the message names it, its value, and who can raise it."""


class EngineError(LoRAFleetError):
    """The engine could not answer."""


class EngineDead(EngineError):
    """The engine process is gone, or no longer makes progress."""


class EngineUnavailable(EngineDead):
    """The engine was already dead, so the request cannot be what killed it."""


class RequestTimeout(EngineError, TimeoutError):
    """An answer did not come within its deadline."""


def describe(error: BaseException) -> str:
    """An exception nobody foresaw, in words: its class, and what it says if it says anything."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
