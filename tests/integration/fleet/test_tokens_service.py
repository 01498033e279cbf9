# SPDX-License-Identifier: Apache-2.0
import asyncio
import json

import pytest

from router.config_sections import LocalTokenizer as LocalEntry
from router.config_sections import TokensConfig
from router.errors import ConfigError, FallbackReason, TokensUnavailable
from router.fleet.poller import parse_models
from router.fleet.worker import Health, Parity, WorkerStatus
from router.tokens.service import TokenService, TokenSource, load_local_tokenizers

OTHER = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hello, world!"}]}


def status_of(worker, worker_id="w"):
    models = parse_models(json.dumps({"data": worker.models}).encode())
    return WorkerStatus(worker.spec(id=worker_id), health=Health.HEALTHY, models=models)


@pytest.fixture
async def make_service():
    services = []

    async def make(statuses, **local):
        config = TokensConfig(
            local=tuple(LocalEntry(model=name, path=str(path)) for name, path in local.items()),
            worker_timeout_s=5.0,
        )
        service = TokenService(config, load_local_tokenizers(config), lambda: statuses)
        services.append(service)
        await service.start()
        return service

    yield make
    for service in services:
        await service.stop()


async def unavailable(service, request):
    with pytest.raises(TokensUnavailable) as caught:
        await service.tokenize(request)
    return caught.value.reason


async def test_local_and_worker_ids_are_equal(
    fake_worker, make_service, tokenizer_dir, engine_tokenize, make_request
):
    directory = tokenizer_dir()
    worker = await fake_worker(tokenize=engine_tokenize(directory))
    statuses = [status_of(worker)]
    local = await (await make_service(statuses, m=directory)).tokenize(make_request(CHAT))
    remote = await (await make_service(statuses)).tokenize(make_request(CHAT))
    assert (local.source, remote.source) == (TokenSource.LOCAL, TokenSource.WORKER)
    assert local.prompts == remote.prompts
    assert local.total > 5


async def test_each_model_its_aliases_and_adapters_use_their_own_tokenizer(
    fake_worker, make_service, tokenizer_dir, make_request
):
    worker = await fake_worker(
        models=[
            {"id": "a", "root": "org/a", "parent": None},
            {"id": "a-alias", "root": "org/a", "parent": None},
            {"id": "a-lora", "root": "/x", "parent": "a"},
            {"id": "b", "root": "org/b", "parent": None},
        ]
    )
    service = await make_service(
        [status_of(worker)], **{"a-alias": tokenizer_dir(), "org/b": tokenizer_dir(OTHER, "other")}
    )
    ids = {}
    for model in ("a", "a-alias", "a-lora", "b"):
        tokens = await service.tokenize(make_request({**CHAT, "model": model}))
        assert tokens.source is TokenSource.LOCAL
        ids[model] = list(tokens.prompts[0])
    assert ids["a"] == ids["a-alias"] == ids["a-lora"]
    assert ids["b"] != ids["a"]


async def test_all_four_prompt_shapes(fake_worker, make_service, tokenizer_dir, make_request):
    worker = await fake_worker()
    service = await make_service([status_of(worker)], m=tokenizer_dir())

    async def ids(prompt):
        tokens = await service.tokenize(make_request({"model": "m", "prompt": prompt}, "/v1/completions"))
        return [list(p) for p in tokens.prompts], tokens.source

    (one,), source = await ids("ab")
    assert source is TokenSource.LOCAL
    assert await ids(["ab", "c"]) == ([one, (await ids("c"))[0][0]], TokenSource.LOCAL)
    assert await ids([7, 8, 9]) == ([[7, 8, 9]], TokenSource.GIVEN)
    assert await ids([[7, 8], [9]]) == ([[7, 8], [9]], TokenSource.GIVEN)


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/responses", {"model": "m", "input": "x"}, FallbackReason.UNKNOWN_PATH),
        ("/v1/messages", CHAT, FallbackReason.UNKNOWN_PATH),
        ("/v1/embeddings", {"model": "m", "input": ["a", [1]]}, FallbackReason.UNKNOWN_PATH),
        ("/v1/chat/completions", None, FallbackReason.UNPARSABLE_BODY),
        ("/v1/chat/completions", {"model": "m"}, FallbackReason.NO_PROMPT),
        ("/v1/completions", {"model": "m", "prompt": ["a", 1]}, FallbackReason.NO_PROMPT),
    ],
)
async def test_what_has_no_prompt_of_a_known_shape_says_so(
    fake_worker, make_service, make_request, path, body, reason
):
    worker = await fake_worker()
    service = await make_service([status_of(worker)])
    assert await unavailable(service, make_request(body, path)) is reason
    assert worker.requests == []


async def test_without_any_tokenizer_the_reason_is_named(fake_worker, make_service, make_request):
    worker = await fake_worker()
    service = await make_service([status_of(worker)])
    assert await unavailable(service, make_request(CHAT)) is FallbackReason.TOKENIZER_ERROR
    assert await unavailable(service, make_request(CHAT)) is FallbackReason.TOKENIZER_ERROR
    assert len(worker.seen("/tokenize")) == 1, "a worker without the call is not asked again"


async def test_a_dead_worker_is_passed_over(fake_worker, make_service, make_request):
    dead, alive = await fake_worker(), await fake_worker(tokenize=lambda _: [1, 2, 3])
    statuses = [status_of(dead, "dead"), status_of(alive, "alive")]
    await dead.stop()
    service = await make_service(statuses)
    assert list((await service.tokenize(make_request(CHAT))).prompts[0]) == [1, 2, 3]


async def test_a_refusal_is_not_repeated_at_another_worker(fake_worker, make_service, make_request):
    workers = [await fake_worker(tokenize=lambda _: 400) for _ in range(3)]
    service = await make_service([status_of(w, str(i)) for i, w in enumerate(workers)])
    assert await unavailable(service, make_request(CHAT)) is FallbackReason.TOKENIZER_ERROR
    assert sum(len(worker.seen("/tokenize")) for worker in workers) == 1


async def test_the_worker_gets_everything_that_decides_the_ids(fake_worker, make_service, make_request):
    worker = await fake_worker(tokenize=lambda _: [1])
    service = await make_service([status_of(worker)])
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {
        **CHAT,
        "tools": tools,
        "documents": [{"text": "d"}],
        "reasoning_effort": "high",
        "chat_template_kwargs": {"x": 1},
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template": "{{ messages }}",
        "temperature": 0.5,
    }
    await service.tokenize(make_request(body))
    assert json.loads(worker.seen("/tokenize")[0]) == {
        "model": "m",
        "messages": CHAT["messages"],
        "tools": tools,
        "add_generation_prompt": False,
        "continue_final_message": True,
        "add_special_tokens": True,
        "chat_template": "{{ messages }}",
        "chat_template_kwargs": {
            "x": 1,
            "reasoning_effort": "high",
            "enable_thinking": True,
            "documents": [{"text": "d"}],
        },
    }
    prompt = {"model": "m", "prompt": ["a", "b"], "add_special_tokens": False}
    await service.tokenize(make_request(prompt, "/v1/completions"))
    assert [json.loads(body) for body in worker.seen("/tokenize")[1:]] == [
        {"model": "m", "prompt": text, "add_special_tokens": False} for text in ("a", "b")
    ]


async def test_a_chat_the_local_template_refuses_is_left_to_the_worker(
    fake_worker, make_service, tokenizer_dir, make_request
):
    worker = await fake_worker(tokenize=lambda _: [4])
    directory = tokenizer_dir("{{ raise_exception('no') }}")
    service = await make_service([status_of(worker)], m=directory)
    tokens = await service.tokenize(make_request(CHAT))
    assert (tokens.source, list(tokens.prompts[0])) == (TokenSource.WORKER, [4])


async def test_parity_is_set_and_a_wrong_template_turns_the_local_tokenizer_off(
    fake_worker, make_service, tokenizer_dir, engine_tokenize, make_request
):
    directory = tokenizer_dir()
    right = await fake_worker(tokenize=engine_tokenize(directory))
    wrong = await fake_worker(tokenize=engine_tokenize(tokenizer_dir(OTHER, "other")))
    statuses = [status_of(right, "right"), status_of(wrong, "wrong")]
    service = await make_service(statuses, m=directory)

    assert await service.probe("right") is Parity.EQUAL
    assert (await service.tokenize(make_request(CHAT))).source is TokenSource.LOCAL

    assert await service.probe("wrong") is Parity.DIFFERENT
    assert [status.parity for status in statuses] == [Parity.EQUAL, Parity.DIFFERENT]
    assert service.turned_off()["m"]["wrong"].differing == "plain chat"
    assert (await service.tokenize(make_request(CHAT))).source is TokenSource.WORKER

    wrong.tokenize = right.tokenize  # restarted with the right template
    assert await service.probe("wrong") is Parity.EQUAL
    assert service.turned_off() == {}
    assert (await service.tokenize(make_request(CHAT))).source is TokenSource.LOCAL


async def test_a_worker_that_leaves_no_longer_keeps_the_tokenizer_off(
    fake_worker, make_service, tokenizer_dir, engine_tokenize
):
    wrong = await fake_worker(tokenize=engine_tokenize(tokenizer_dir(OTHER, "other")))
    service = await make_service([status_of(wrong, "wrong")], m=tokenizer_dir())
    await service.probe("wrong")
    assert service.local_tokenizer("m") is None
    service.forget("wrong")
    assert service.local_tokenizer("m") is not None


@pytest.mark.parametrize("broken", ["one id", "special tokens", "tools"])
async def test_the_probe_notices_small_differences(
    fake_worker, make_service, tokenizer_dir, engine_tokenize, broken
):
    directory = tokenizer_dir()
    good = engine_tokenize(directory)

    def tokenize(body):
        ids = good(body)
        if broken == "one id":
            return [*ids[:-1], ids[-1] ^ 1]
        if broken == "special tokens" and body.get("add_special_tokens") and "prompt" in body:
            return ids[1:]
        return [*ids, 5] if broken == "tools" and "tools" in body else ids

    worker = await fake_worker(tokenize=tokenize)
    service = await make_service([status_of(worker)], m=directory)
    assert await service.probe("w") is Parity.DIFFERENT


async def test_parity_of_workers_that_cannot_be_compared(fake_worker, make_service, tokenizer_dir):
    worker = await fake_worker()
    statuses = [status_of(worker)]
    assert await (await make_service(statuses, m=tokenizer_dir())).probe("w") is Parity.UNKNOWN
    assert await (await make_service(statuses)).probe("w") is Parity.REMOTE
    assert await (await make_service(statuses)).probe("nobody") is Parity.UNKNOWN


async def test_a_long_prompt_does_not_stall_the_event_loop(
    fake_worker, make_service, tokenizer_dir, make_request
):
    worker = await fake_worker()
    service = await make_service([status_of(worker)], m=tokenizer_dir())
    body = {"model": "m", "prompt": "some words and 12345 numbers, " * 30_000}
    ticks = 0
    done = asyncio.Event()

    async def tick():
        nonlocal ticks
        while not done.is_set():
            ticks += 1
            await asyncio.sleep(0.001)

    ticking = asyncio.create_task(tick())
    tokens = await service.tokenize(make_request(body, "/v1/completions"))
    done.set()
    await ticking
    assert tokens.total > 100_000
    assert ticks > 20


async def test_an_unreadable_tokenizer_is_a_configuration_error(tmp_path):
    config = TokensConfig(local=(LocalEntry(model="m", path=str(tmp_path)),))
    with pytest.raises(ConfigError) as caught:
        load_local_tokenizers(config)
    assert caught.value.field == "tokens.local[0].path"
    assert "tokenizer.json" in caught.value.accepted
