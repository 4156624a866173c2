"""An executor whose private name torch has lost is disabled, with one warning."""

from __future__ import annotations

import warnings

import pytest
import torch

from rlstruct.agents import ActorCritic, ActorCriticAgent
from rlstruct.batchers import RL_Batcher
from rlstruct.engine import torch_private
from rlstruct.engine.compiled import Compiled
from rlstruct.engine.graph import capture_cuda, capture_on
from rlstruct.sims import make


def test_the_installed_torch_has_all_names() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_private.check()
    assert [torch_private.missing(executor) for executor in torch_private.NEEDED] == [[]] * len(torch_private.NEEDED)


def test_a_module_that_is_not_imported_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch._inductor.compile_fx"
    monkeypatch.delitem(torch_private.sys.modules, name, raising=False)
    absent = [f"{name}:compile_fx_inn", "torch._no_such_module:x"]
    monkeypatch.setitem(torch_private.NEEDED, "compiled", (f"{name}:compile_fx_inner", *absent))
    assert torch_private.missing("compiled") == absent


@pytest.mark.parametrize(
    ("processor", "family"),
    [
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 1\n", 25),
        ("processor\t: 0\nvendor_id\t: GenuineIntel\ncpu family\t: 26\nmodel\t\t: 143\n", 0),
        ("AMD64 Family 26 Model 68 Stepping 0, AuthenticAMD", 26),
        ("arm", 0),
        ("", 0),
    ],
)
def test_the_family_of_a_processor(processor: str, family: int) -> None:
    assert torch_private.family_of_amd(processor) == family


def test_without_a_name_agents_act_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch imports some of its deprecated parts
        import torch._inductor.compile_fx
    monkeypatch.delattr(torch._inductor.compile_fx, "compile_fx_inner")
    with pytest.warns(
        UserWarning, match=r"compile_fx_inner.*'compiled' is disabled.*tests have run with torch 2\.7 to"
    ):
        torch_private.check()
    torch.manual_seed(0)
    agent = ActorCriticAgent(ActorCritic(4, 2))
    with RL_Batcher(4, lambda: agent, make, env_args={"name": "CartPole-v1", "n_envs": 2}, compile_agent=True) as made:
        made.reset()
        made.execute()
        with pytest.warns(UserWarning, match=r"runs eagerly.*lacks torch\._inductor\.compile_fx:compile_fx_inner"):
            assert made.get()[0] is not None


@pytest.mark.slow
def test_without_a_name_steps_with_bools_are_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "torch._inductor.codegen.cpp:TilingSelect"
    monkeypatch.setitem(torch_private.NEEDED, "scalar loops", (name + "s",))
    with pytest.warns(UserWarning, match=r"cpp\.TilingSelects, so compiled steps that compute with bools are slower"):
        torch_private.check()
    a, b = torch.arange(64).view(8, 8) % 3 == 0, torch.arange(64).view(8, 8) % 2 == 0

    def mix(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.stack([a & b, a | ~b], 2), (a ^ b).any(1)

    for names in ((name + "s",), (name,)):
        monkeypatch.setitem(torch_private.NEEDED, "scalar loops", names)
        for got, expected in zip(Compiled(mix)(a, b), mix(a, b), strict=True):
            assert torch.equal(got, expected)


@pytest.mark.slow
def test_without_a_name_code_is_generated_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(torch_private.NEEDED, "code on disk", ("torch._guards:TracingContexts",))
    with pytest.warns(UserWarning, match=r"TracingContexts, so every process generates the code of its steps anew"):
        torch_private.check()
    x = torch.arange(24.0).view(6, 4)
    (found,) = Compiled(lambda x: (x.sum(1) > 30.0,))(x)
    assert found.tolist() == [False, False, True, True, True, True]
    assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_bypass"] > 0


def test_without_a_name_nothing_is_captured_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    names = [name for names in torch_private.NEEDED["graph"] for name in names.split(":")[1].split("|")]
    for name in names:
        monkeypatch.setattr(torch._C, name, lambda *_: None, raising=False)
    assert capture_on(torch.device("cuda", 0)) is capture_cuda
    monkeypatch.delattr(torch._C, "_cuda_endAllocateToPool")  # torch 2.7 has it under an older name
    assert capture_on(torch.device("cuda", 0)) is capture_cuda
    monkeypatch.delattr(torch._C, "_cuda_clearCublasWorkspaces")
    assert capture_on(torch.device("cuda", 0)) is None
    with pytest.warns(UserWarning, match="_cuda_clearCublasWorkspaces.*'graph' is disabled"):
        torch_private.check()


@pytest.mark.parametrize(
    ("executor", "name"),
    [
        ("compiled", "torch._inductor.graph#user_visible_output_idxs"),
        ("compiled", "torch._inductor.graph#original_output_strides"),
        ("compiled", "torch._inductor.output_code#current_callable"),
        ("compiled", "torch.utils._config_module#patch"),
        ("compiled", "torch.fx.experimental.proxy_tensor#_allow_non_fake_inputs"),
        ("fused optimiser", "torch.optim.adam#found_inf"),
        ("kernel", "torch.nn.modules.module:_global_forward_hooks"),
    ],
)
def test_keys_arguments_and_attributes_are_listed_too(
    executor: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor would choose strides without a word, for example, if it no longer knew the key that asks for them."""
    assert name in torch_private.NEEDED[executor]
    real = torch_private.source_of
    last = name.replace("#", ":").split(":")[1]
    monkeypatch.setattr(torch_private, "source_of", lambda module: real(module).replace(last, "renamed"))
    if ":" in name:
        monkeypatch.delattr(name.replace(":", "."))
    with pytest.warns(UserWarning, match=f"{last}.*executor {executor!r} is disabled"):
        torch_private.check()
    assert name in torch_private.missing(executor)
