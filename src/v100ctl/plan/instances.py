"""From what is asked of a host to instances that can run: cards, driver, CUDA, releases, command lines, memory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from datetime import date

from v100ctl.catalog import Catalog
from v100ctl.catalog.speeds import speeds_like
from v100ctl.catalog.vllm import VllmRow
from v100ctl.facts import Facts
from v100ctl.fleet import HostConfig, InstanceSpec
from v100ctl.models.types import Known, ModelHeader, NotAModel
from v100ctl.plan import adoption, external, llama_cpp, profiles, vllm, vllm_memory, vram
from v100ctl.plan.cards import HostCard, choose, host_cards, usable_cards
from v100ctl.plan.cuda import decide_cuda
from v100ctl.plan.driver import decide_driver
from v100ctl.plan.fit import MARGIN_BYTES, Fit, cards_of, cuda_cards, fit, launch_of
from v100ctl.plan.gateway import UNIT as GATEWAY_UNIT
from v100ctl.plan.gateway import behind
from v100ctl.plan.keys import environment_path, key_files, key_rules, keyless_engine_rule, keys_path
from v100ctl.plan.models import model_path, model_specs
from v100ctl.plan.numa import place, threads_of
from v100ctl.plan.rules.card_state import state_rules
from v100ctl.plan.rules.engine import engine_rules
from v100ctl.plan.rules.external import (
    argv_missing_rule,
    label_rules,
    memory_rule,
    misplaced_engine_rule,
    needs_rules,
    unknown_engine_rule,
    unset_placeholder_rule,
    words_rules,
)
from v100ctl.plan.rules.gpu import bus_rules, busy_rules, fabric_rules, others_bytes, presence_rules
from v100ctl.plan.rules.host import distribution_of
from v100ctl.plan.rules.instance import (
    argv_rules,
    extra_args_rules,
    host_memory_rules,
    instance_rules,
    kv_kernel_rules,
    placement_rules,
    unspelled_rule,
)
from v100ctl.plan.rules.model import (
    draft_rules,
    fit_rules,
    header_rules,
    header_unread_rule,
    invalid_model_rule,
    memory_unknown_rule,
    projector_rule,
)
from v100ctl.plan.rules.vllm import (
    capability_of,
    quantization_method,
    vllm_argv_rules,
    vllm_extra_args_rules,
    vllm_release_rules,
    vllm_rules,
    vllm_sharing_rules,
    vllm_unspelled_rule,
)
from v100ctl.plan.tuning import decide_tuning
from v100ctl.plan.types import (
    Adoption,
    CudaDecision,
    DriverDecision,
    GpuBudget,
    Instance,
    ManagedFile,
    Model,
    Placement,
    Proof,
    Release,
    Rule,
    TuningDecision,
)
from v100ctl.plan.units import START_TIMEOUT_S, Surroundings, local_url, render_unit, unit_name

#: CUDA's own order is by speed, nvidia-smi's by bus: without this an index means another card.
_BY_BUS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _with_memory(instance: Instance, chosen: Sequence[HostCard]) -> Proof:
    """An instance's proof with what it holds at least of each card: its weights lie there before it answers."""
    if not instance.proof.on_cards:
        return instance.proof
    budgets = {card.gpu.uuid: instance.budgets.get(card.key) for card in chosen if card.gpu.uuid}
    least = {uuid: budget.weights_bytes if budget else 0 for uuid, budget in budgets.items()}
    return dataclasses.replace(instance.proof, least_bytes=least)


def _parser_argv(engine: str, argv: tuple[str, ...]) -> tuple[str, ...]:
    """What has the engine read its command line; nothing for an engine of which nobody knows that it can."""
    if engine == "vllm":
        return vllm.parser_argv(argv)
    return llama_cpp.parser_argv(argv) if engine == "llama_cpp" else ()


class Planner:
    """Decides one host's instances. After :meth:`decide` its public attributes hold the result."""

    def __init__(
        self,
        host: str,
        config: HostConfig,
        facts: Facts,
        headers: Mapping[str, Known],
        catalog: Catalog,
        as_of: date,
        *,
        models: Sequence[Model],
        going: Collection[str],
    ) -> None:
        self.host, self.config, self.facts, self.headers, self.catalog, self.as_of = host, config, facts, headers, catalog, as_of
        self._models = {model.path: model for model in models}
        self._going = going
        #: The instances as the inventory has them with their profiles, and as their engines are started.
        self.public: dict[str, InstanceSpec] = {}
        self._specs: dict[str, InstanceSpec] = {}
        #: Instances whose profile cannot be applied: what is wrong with the rest of them would be guessed.
        self._unresolved: set[str] = set()
        self._distribution = distribution_of(facts, catalog)
        self.llama_cpp_row = catalog.llama_cpp_build(config.llama_cpp_build)
        self.host_verdicts: list[Rule] = []
        self.instance_verdicts: list[Rule] = []
        for name, spec in sorted(config.llm_server_instances.items()):
            if spec.state == "present":
                self.public[name], problems = profiles.applied(name, spec, catalog)
                self._specs[name] = behind(self.public[name], config)
                self.instance_verdicts += problems
                if problems:
                    self._unresolved.add(name)
        self.instances: dict[str, Instance] = {}
        self.files: dict[str, ManagedFile] = {}
        self.secret_files: tuple[ManagedFile, ...] = ()
        #: Of llama.cpp.
        self.releases: tuple[Release, ...] = ()
        self.vllm_releases: tuple[Release, ...] = ()
        self.driver: DriverDecision | None = None
        self.cuda: CudaDecision | None = None
        self.tuning: TuningDecision | None = None
        self.tuning_files: tuple[ManagedFile, ...] = ()
        self._cards: tuple[HostCard, ...] = ()
        self._chosen: dict[str, tuple[HostCard, ...]] = {}
        self._placements: dict[str, Placement] = {}
        self._fits: dict[str, Fit] = {}
        #: Servers of others that are stopped before ours are started.
        self.adoptions: tuple[Adoption, ...] = ()

    @property
    def leaving(self) -> frozenset[int]:
        """The processes of others that are stopped."""
        return frozenset(item.pid for item in self.adoptions)

    @property
    def specs(self) -> Mapping[str, InstanceSpec]:
        """The instances that shall serve, with what their profiles say."""
        return self._specs

    @property
    def builds_here(self) -> bool:
        """Whether an engine may be compiled on this host. A cached copy is not a fact of the host, so it is not counted on."""
        return self.config.llama_cpp_build_on in ("first", self.host)

    @property
    def _compiles(self) -> bool:
        """Whether the host needs an engine that it does not have yet."""
        found = [self.facts.release(release.path) for release in self.releases if release.engine == "llama_cpp"]
        return not (found and all(release is not None and not release.problem for release in found))

    def _on_cards(self, spec: InstanceSpec) -> bool:
        if spec.engine == "external":
            definition = self.config.external_engine_definitions.get(spec.external or "")
            return definition is None or definition.backend == "cuda"
        return spec.engine == "vllm" or self.config.llama_cpp_backend == "cuda"

    def decide(self) -> None:
        """Decide everything, in the order in which one thing rests on another."""
        llama = [name for name, spec in self._specs.items() if spec.engine == "llama_cpp"]
        if llama or not self._specs:
            self.host_verdicts += engine_rules(self.config, self.facts, self.llama_cpp_row, self.catalog)
        if llama and self.llama_cpp_row and self._distribution:
            self.releases = (
                llama_cpp.build_release(self.config, self.llama_cpp_row, self._distribution, self.facts, self.catalog),
            )
        vllm_row = self.catalog.vllm(self.config.vllm_version)
        if vllm_row is not None and any(spec.engine == "vllm" for spec in self._specs.values()):
            release = vllm.release(self.config, vllm_row, self._distribution, self.facts)
            self.vllm_releases = (release,) if release else ()
        if any(self._on_cards(spec) for spec in self._specs.values()):
            self._decide_cards()
        self._decide_adoptions()
        for name, spec in self._specs.items():
            if name not in self._unresolved:
                self._decide_instance(name, spec)
        resolved = self.config.model_copy(update={"llm_server_instances": self._specs})
        keys = {name: [card.key for card in cards] for name, cards in self._chosen.items()}
        taken = {name: instance.budgets for name, instance in self.instances.items() if instance.engine == "vllm"}
        self.host_verdicts += vllm_sharing_rules(resolved, keys, self.catalog, taken)
        self._decide_fits()
        for name, found in self._fits.items():
            if name in self.instances:
                self.instances[name] = dataclasses.replace(
                    self.instances[name],
                    budgets=found.budgets,
                    largest_context_length=found.largest_context_length,
                    decode_ceiling_tps=found.decode_ceiling_tps or None,
                    published=speeds_like(found.header.architecture, found.header.file_bytes),
                )
        for name, instance in self.instances.items():
            self.instances[name] = dataclasses.replace(instance, proof=_with_memory(instance, self._chosen.get(name, ())))

    # Cards, driver, CUDA

    def _architectures(self, spec: InstanceSpec) -> str:
        # llama.cpp is compiled for what the inventory says; the wheels of vLLM hold what their catalog row says.
        if spec.engine == "llama_cpp":
            return self.config.llama_cpp_cuda_architectures
        definition = self.config.external_engine_definitions.get(spec.external or "")
        return definition.cuda_architectures if definition else "70"

    def _decide_cards(self) -> None:
        self._cards = host_cards(self.facts, self.catalog)
        on_cards = {name: spec for name, spec in self._specs.items() if self._on_cards(spec)}
        wanted = sorted({self._architectures(spec) for spec in on_cards.values()})
        for architectures in wanted:
            usable = usable_cards(self._cards, architectures)
            compiled = any(
                spec.engine == "llama_cpp" and self._architectures(spec) == architectures for spec in on_cards.values()
            )
            self.host_verdicts += presence_rules(self._cards, usable, architectures, self.facts, self.catalog, compiled=compiled)
        for name, spec in on_cards.items():
            usable = usable_cards(self._cards, self._architectures(spec))
            self._chosen[name], problems = choose(name, spec, self._cards, usable)
            if self._cards:
                self.instance_verdicts += problems
        chosen = {card.key for cards in self._chosen.values() for card in cards}
        self.host_verdicts += bus_rules(self._cards, chosen)
        self.host_verdicts += state_rules(self._cards, chosen, self.facts, persistence=self.config.gpu_tuning_persistence)
        self.driver, verdicts = decide_driver(self.config, self.facts, self._cards, self._distribution, self.catalog, self.as_of)
        if self.driver is not None:
            serving = tuple(name for name in sorted(on_cards) if self.facts.process_of(unit_name(name)) is not None)
            self.driver = dataclasses.replace(self.driver, serving=serving)
        self.host_verdicts += verdicts
        self.host_verdicts += fabric_rules(self._cards, self.facts, self.driver.branch if self.driver else None)
        llama = any(spec.engine == "llama_cpp" for spec in on_cards.values())
        if llama:
            self.cuda, verdicts = decide_cuda(
                self.config,
                self.facts,
                self.driver,
                self._distribution,
                self.catalog,
                compiles_here=self._compiles and self.builds_here,
                in_container=self._compiles and self.config.llama_cpp_build_on == llama_cpp.CONTAINER,
            )
            self.host_verdicts += verdicts
        self.tuning, self.tuning_files, verdicts = decide_tuning(self.config, self.facts, self._cards)
        self.host_verdicts += verdicts

    # Instances

    def _decide_adoptions(self) -> None:
        ours = {GATEWAY_UNIT, *map(unit_name, self._specs), *self._going}
        for name, spec in self._specs.items():
            found = adoption.places((self.public[name], spec), self._chosen.get(name, ()), self.facts, ours)
            # Two instances may share the card of one that goes.
            places = [place for place in found if place.occupant.pid not in self.leaving]
            stopped, verdicts = adoption.decide(self.host, name, self.config, places, self.facts.secret_salt, self.catalog)
            self.adoptions += stopped
            self.instance_verdicts += verdicts

    def _decide_instance(self, name: str, spec: InstanceSpec) -> None:
        row = self.llama_cpp_row
        self.instance_verdicts += instance_rules(name, self.public[name], self.config, row, self.catalog)
        self.instance_verdicts += key_rules(name, self.public[name], self.config, self.catalog.vllm(self.config.vllm_version))
        model = self._models[model_path(spec.model)]
        self.instance_verdicts += placement_rules(
            name,
            spec,
            model,
            unit_name(name),
            self.facts,
            going=self._going,
            leaving=self.leaving,
            on_cards=self._on_cards(spec),
        )
        ours = {unit_name(other) for other in self._specs} | set(self._going)
        chosen = self._chosen.get(name, ())
        for card in chosen:
            self.instance_verdicts += busy_rules(card, ours, name, self.facts, self.leaving)
        placement, problems = place(name, spec, chosen, self.facts)
        self.instance_verdicts += problems
        if placement is not None:
            self._placements[name] = placement
        self.instance_verdicts += profiles.card_rules(name, spec, chosen, self.catalog)
        if spec.external is not None and spec.engine != "external":
            self.instance_verdicts.append(misplaced_engine_rule(name, spec))
        if spec.engine == "llama_cpp" and row is not None:
            self._decide_llama_cpp(name, spec, model)
        elif spec.engine == "vllm":
            self._decide_vllm(name, spec, model)
        elif spec.engine == "external":
            self._decide_external(name, spec, model)

    def _decide_llama_cpp(self, name: str, spec: InstanceSpec, model: Model) -> None:
        row, release = self.llama_cpp_row, next((item for item in self.releases if item.engine == "llama_cpp"), None)
        if row is None:
            return
        self._judge_model(name, spec)
        if self._on_cards(spec):
            self.instance_verdicts += kv_kernel_rules(name, spec, row, all_types=self.config.llama_cpp_flash_attention_all_types)
        problems = [*extra_args_rules(name, spec, row, self.catalog)]
        if problems or release is None or llama_cpp.meaningless_settings(spec.settings):
            # No command line is made: a secret in it would stand in every report of the plan.
            self.instance_verdicts += problems
            return
        alias = spec.settings.served_model_name or name
        parser = self.catalog.llama_cpp_parser(row.build)
        try:
            argv = llama_cpp.argv(
                self.config,
                spec,
                row,
                self.facts,
                release_path=release.path,
                model_path=model.path,
                alias=alias,
                draft_model_path=self._draft_path(spec),
                api_keys_file=keys_path(name) if spec.keys else None,
                parser=parser,
                threads=threads_of(self._placements[name], self.facts) if name in self._placements else None,
            )
        except llama_cpp.UnspelledSettingError as error:
            self.instance_verdicts.append(unspelled_rule(name, row, error, self.catalog))
            return
        self.instance_verdicts += argv_rules(name, argv, row, self.catalog)
        chosen = self._chosen.get(name, ())
        environment = {}
        if chosen:
            # Eager loading, the default before CUDA 12.2, fills the card with kernels that are never called.
            environment = {
                **_BY_BUS,
                "CUDA_MODULE_LOADING": "LAZY",
                "CUDA_VISIBLE_DEVICES": ",".join(card.visible_as for card in chosen),
            }
        self._add_instance(
            name,
            spec,
            argv,
            environment,
            release_path=release.path,
            health_path=row.health_path,
            context_length=llama_cpp.context_per_request(spec.settings),
            parallel=spec.settings.parallel or llama_cpp.DEFAULT_PARALLEL,
            proof=llama_cpp.proof(self.config, spec, row, parser),
            weights_on_cards=spec.settings.gpu_layers is None and llama_cpp.moves_memory(spec.extra_args, row, parser) is None,
        )

    def _decide_vllm(self, name: str, spec: InstanceSpec, model: Model) -> None:
        row = self.catalog.vllm(self.config.vllm_version)
        header = self._header(name, model.path, on_cards=True)
        chosen = self._chosen.get(name, ())
        # The user's own share is its margin.
        cards = self._memory_cards(chosen, margin_bytes=0)
        cards = cuda_cards(cards, chosen) if cards else ()
        self.instance_verdicts += vllm_rules(name, spec, self.config, self.facts, row, header, cards, self.catalog)
        if row is None or not row.launchable:
            return
        self.instance_verdicts += vllm_release_rules(name, self.config, self.facts, row, self.catalog)
        problems = [*vllm_extra_args_rules(name, spec, row)]
        self.instance_verdicts += problems
        release = next(iter(self.vllm_releases), None)
        if problems or release is None or vllm.meaningless_settings(spec.settings, row):
            return
        release_path = release.path
        try:
            argv = vllm.argv(
                spec,
                row,
                release_path=release_path,
                model_path=model.path,
                alias=spec.settings.served_model_name or name,
                gpu_count=max(len(chosen), 1),
                draft_model_path=self._draft_path(spec),
            )
        except vllm.UnspelledSettingError as error:
            self.instance_verdicts.append(vllm_unspelled_rule(name, row, error, self.catalog))
            return
        parser = self.catalog.vllm_parser(row.version)
        if parser is not None and not vllm.own_build(self.config):
            found = vllm.check_argv(argv, parser, former=row.former_arguments)
            self.instance_verdicts += vllm_argv_rules(name, found)
        environment = {**_BY_BUS, **vllm.environment(name, spec, row)}
        self._add_instance(
            name,
            spec,
            argv,
            environment,
            release_path=release_path,
            health_path=row.health_path,
            context_length=vllm.context_per_request(spec.settings),
            parallel=vllm.requests_at_once(spec.settings, row),
            # It computes nowhere else, and says nothing about its cards that every version words alike.
            proof=Proof(on_cards=True),
            # It reads `CUDA_VISIBLE_DEVICES` as numbers: a UUID there is an error.
            by_index=True,
            weights_on_cards=True,
            # Triton compiles kernels.
            writes_code=True,
        )
        computed = vllm.moves_memory(spec.extra_args, row) is None and not vllm.own_build(self.config)
        if header is not None and header.format == "safetensors" and cards and computed:
            self._fit_vllm(name, spec, row, header, cards)

    def _fit_vllm(self, name: str, spec: InstanceSpec, row: VllmRow, header: ModelHeader, cards: tuple[vram.Card, ...]) -> None:
        method = quantization_method(spec.settings, header, capability_of(cards))
        launch = vllm_memory.launch_of(spec.settings, row, method)
        limit = vllm_memory.context_limit(header, spec.settings, row)
        context = vllm.context_per_request(spec.settings)
        # The rules have said already what is not known about the model.
        with contextlib.suppress(vllm_memory.UnknownModelError):
            found = vllm_memory.estimate(header, launch, row, cards, limit=limit.tokens if limit else context)
            self.instances[name] = dataclasses.replace(
                self.instances[name],
                budgets=found.budgets,
                largest_context_length=found.largest_context,
                decode_ceiling_tps=vllm_memory.decode_ceiling_tps(header, launch, row, cards, fill_tokens=0) or None,
            )

    def _decide_external(self, name: str, spec: InstanceSpec, model: Model) -> None:
        definitions, profile = self.config.external_engine_definitions, self.catalog.profiles.get(spec.profile or "")
        self.instance_verdicts += needs_rules(
            name,
            external.needs_of(spec, definitions, profile),
            driver=self.driver.version or self.driver.branch if self.driver else "",
            glibc=self.facts.libc.version if self.facts.libc.name == "glibc" else "",
            catalog=self.catalog,
        )
        engine = external.engine_of(spec, definitions, profile)
        if engine is None:
            self.instance_verdicts.append(unknown_engine_rule(name, spec, self.config))
            return
        if not engine.argv:
            self.instance_verdicts.append(argv_missing_rule(name, engine))
            return
        problems = [*words_rules(name, engine, spec)]
        self.instance_verdicts += problems
        if any(problem.severity == "refuse" for problem in problems):
            return
        if spec.keys and "api_keys_file" not in engine.names:
            self.instance_verdicts.append(keyless_engine_rule(name, engine.name, gateway=self.config.gateway_placement == "host"))
        release = external.build_release(engine)
        self.instance_verdicts += label_rules(name, release, self.facts)
        if release not in self.releases:
            self.releases = (*self.releases, release)
        chosen = self._chosen.get(name, ())
        known = external.values(
            engine,
            spec,
            release_path=release.path,
            model_path=model.path,
            draft_model_path=self._draft_path(spec),
            alias=spec.settings.served_model_name or name,
            gpu_count=len(chosen),
            api_keys_file=keys_path(name) if spec.keys else None,
        )
        try:
            argv = tuple(external.filled(word, known) for word in engine.argv) + spec.extra_args
            environment = {key: external.filled(value, known) for key, value in engine.definition.env.items()}
        except external.UnsetPlaceholderError as error:
            self.instance_verdicts.append(unset_placeholder_rule(name, error.args[0]))
            return
        if chosen:
            by_uuid = engine.definition.visible_devices == "uuid"
            environment = {**_BY_BUS, **environment}
            if by_uuid:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(card.visible_as for card in chosen)
            self.instance_verdicts.append(memory_rule(name, engine))
        self._add_instance(
            name,
            spec,
            argv,
            environment,
            release_path=release.path,
            health_path=engine.health_path,
            completion_path=engine.definition.completion_path,
            context_length=external.context_length(engine, spec),
            parallel=spec.settings.parallel or llama_cpp.DEFAULT_PARALLEL,
            proof=Proof(on_cards=bool(chosen), must_log=engine.must_log, must_not_log=engine.definition.must_not_log),
            by_index=engine.definition.visible_devices != "uuid",
            # Nobody knows that it does not.
            writes_code=True,
        )

    def _draft_path(self, spec: InstanceSpec) -> str | None:
        return next((model_path(item) for item in list(model_specs(spec))[1:]), None)

    def _add_instance(
        self,
        name: str,
        spec: InstanceSpec,
        argv: tuple[str, ...],
        environment: Mapping[str, str],
        *,
        release_path: str,
        health_path: str,
        context_length: int,
        parallel: int,
        proof: Proof,
        completion_path: str = "/v1/chat/completions",
        by_index: bool = False,
        weights_on_cards: bool = False,
        writes_code: bool = False,
    ) -> None:
        keys = tuple(card.key for card in self._chosen.get(name, ()))
        file, complete, digest = render_unit(
            name,
            engine=spec.engine,
            argv=argv,
            environment=environment,
            release_path=release_path,
            model_sha256s=tuple(item.digest for item in model_specs(spec)),
            around=Surroundings(
                model_paths=tuple(model_path(item) for item in model_specs(spec)),
                cards=keys,
                weights_on_cards=weights_on_cards,
                by_index=by_index,
                writes_code=writes_code,
                placement=self._placements.get(name),
                systemd_version=self.facts.systemd.version if self.facts.systemd else 0,
                secret_environment_file=environment_path(name) if spec.keys else "",
            ),
        )
        self.files[name] = file
        self.secret_files += key_files(name, spec)
        self.instances[name] = Instance(
            name=name,
            unit=unit_name(name),
            engine=spec.engine,
            argv=argv,
            environment=complete,
            digest=digest,
            release_path=release_path,
            model_path=model_path(spec.model),
            model_alias=spec.settings.served_model_name or name,
            listen=spec.listen,
            port=spec.port,
            health_url=local_url(spec, health_path),
            completion_url=local_url(spec, completion_path),
            start_timeout_s=START_TIMEOUT_S,
            context_length=context_length,
            parallel=parallel,
            parser_argv=_parser_argv(spec.engine, argv),
            gpus=keys,
            proof=proof,
            placement=self._placements.get(name),
            api_keys_file=keys_path(name) if spec.keys else "",
        )

    def _memory_cards(self, chosen: Sequence[HostCard], *, margin_bytes: int = MARGIN_BYTES) -> tuple[vram.Card, ...]:
        """The cards as the memory models take them; none where the size of one is not known."""
        ours = {unit_name(other) for other in self._specs} | set(self._going)
        taken = {card.key: others_bytes(card, ours, self.leaving) for card in chosen}
        cards = cards_of(chosen, taken, margin_bytes=margin_bytes)
        return cards if all(card.total_bytes for card in cards) else ()

    # Models and memory

    def _header(self, name: str, path: str, *, on_cards: bool) -> ModelHeader | None:
        """The header of a model of this instance; where there is none, that is said, once."""
        known = self.headers.get(path, "nobody has read it")
        if isinstance(known, ModelHeader):
            return known
        if isinstance(known, NotAModel):
            self.instance_verdicts.append(invalid_model_rule(name, known.reason))
            return None
        model = self._models.get(path)
        found = [self.facts.models.get(file.path) for file in model.files] if model else []
        missing = any(file is not None and not file.exists for file in found)
        # Where the file itself is missing, or nobody knows what the files are, that is said already.
        if not (model and ((missing and model.source["kind"] == "host") or not model.files)):
            self.instance_verdicts.append(header_unread_rule(name, known, on_cards=on_cards))
        return None

    def _judge_model(self, name: str, spec: InstanceSpec) -> None:
        row = self.llama_cpp_row
        header = self._header(name, model_path(spec.model), on_cards=self._on_cards(spec))
        if header is None or row is None:
            return
        self.instance_verdicts += header_rules(name, spec, header, self.config, row, self.catalog)
        if header.format != "gguf" or llama_cpp.meaningless_settings(spec.settings):
            return
        if not self._on_cards(spec):
            self._judge_host_memory(name, spec, header)
            return
        if not self._chosen.get(name):
            return
        draft: ModelHeader | None = None
        for item in list(model_specs(spec))[1:]:
            draft = self._header(name, model_path(item), on_cards=True)
            if draft is None:
                return
            self.instance_verdicts += draft_rules(name, header, draft)
        moving = llama_cpp.moves_memory(spec.extra_args, row, self.catalog.llama_cpp_parser(row.build))
        if moving is not None:
            reason = f"`{moving}` in `extra_args` decides what lies where, and how large it is"
            self.instance_verdicts.append(memory_unknown_rule(name, reason))
            return
        if spec.settings.mmproj is not None and "--no-mmproj-offload" not in spec.extra_args:
            self.instance_verdicts.append(projector_rule(name, spec.settings.mmproj))
        cards = self._memory_cards(self._chosen[name])
        if not cards:
            self.instance_verdicts.append(memory_unknown_rule(name, "the card's memory size is not known"))
            return
        try:
            self._fits[name] = fit(
                header,
                launch_of(spec, row, self.config.llama_cpp_backend, draft, force_mmq=self.config.llama_cpp_force_mmq),
                cards,
            )
        except vram.UnknownArchitectureError as error:
            self.instance_verdicts.append(memory_unknown_rule(name, error.message))

    def _judge_host_memory(self, name: str, spec: InstanceSpec, header: ModelHeader) -> None:
        row = self.llama_cpp_row
        if row is None or len(list(model_specs(spec))) > 1:
            return
        # Nothing is known of such an architecture; the file's size is judged all the same.
        with contextlib.suppress(vram.UnknownArchitectureError):
            estimate = vram.estimate(header, launch_of(spec, row, "cpu", None), ())
            self.instance_verdicts += host_memory_rules(name, sum(estimate.host_bytes.values()), spec, self.facts)

    def _decide_fits(self) -> None:
        names = {card.key: f"card {card.index} ({card.name})" for card in self._cards}
        budgets = {name: instance.budgets for name, instance in self.instances.items() if instance.budgets}
        budgets |= {name: found.budgets for name, found in self._fits.items()}
        shares = frozenset(name for name, spec in self._specs.items() if spec.engine == "vllm")
        for name, found in self._fits.items():
            neighbours: dict[str, list[tuple[str, GpuBudget]]] = {}
            for other, theirs in budgets.items():
                for key, budget in theirs.items():
                    if other != name and key in found.budgets:
                        neighbours.setdefault(key, []).append((other, budget))
            self.instance_verdicts += fit_rules(name, self._specs[name], found, neighbours, names, shares)
