# Muster. `make` lists the targets.
SHELL   := /bin/bash
GO      ?= go
VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/muster-hpc/muster/ops/version.Version=$(VERSION)
BUILD   := CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)'
TOOL    := $(GO) tool -modfile=tools.mod
# Only muster-gpu has cgo (NVIDIA's library). Without a C compiler it is built, too, and answers that it knows nothing. The
# library is found at run time, so that symbols must not be bound before they are called.
CC_FOUND := $(shell command -v $(firstword $(shell $(GO) env CC)) >/dev/null 2>&1 && echo 1 || echo 0)
export CGO_CFLAGS  ?= -O2 -g -Wno-deprecated-declarations
export CGO_LDFLAGS ?= -O2 -g -Wl,-z,lazy
SLURM   := sbatch srun salloc sattach sbcast sstat squeue scancel sinfo scontrol sacct
PKGS    := ./cmd/... ./fsm/... ./rpc/... ./proto/... ./node/... ./sched/... ./ops/... ./examples/...

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 18

.PHONY: build
build: ## build every program into bin/
	@mkdir -p bin/slurm bin/examples
	$(BUILD) -o bin/ ./cmd/muster ./cmd/muster-controller ./cmd/muster-agent ./cmd/muster-supervisor ./cmd/muster-slurm
	CGO_ENABLED=$(CC_FOUND) $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/muster-gpu
	$(BUILD) -o bin/examples/ ./examples/train
	@for c in $(SLURM); do ln -sfn ../muster-slurm bin/slurm/$$c; done

.PHONY: demo
demo: build ## a training job outlives its controllers, on a real local cluster (under 2 minutes)
	bin/muster dev demo

.PHONY: test
test: build ## every test, on this machine, as any user
	$(GO) test $(PKGS)
	$(GO) test -p 1 -timeout 20m ./e2e/...

.PHONY: test-race
test-race: ## unit tests under the race detector
	$(GO) test -race $(PKGS)

.PHONY: test-gpu
test-gpu: ## the tests of accelerators, also on this machine's own GPUs (needs a C compiler; says what it skips)
	@mkdir -p bin
	CGO_ENABLED=1 $(GO) build -trimpath -ldflags '$(LDFLAGS)' -o bin/ ./cmd/muster-gpu
	CGO_ENABLED=1 MUSTER_GPU_PROBE=$(CURDIR)/bin/muster-gpu $(GO) test -count 1 -tags gpu -v -run Hardware ./cmd/muster-gpu
	CGO_ENABLED=1 $(GO) test -count 1 ./node/gpu/... ./cmd/muster-gpu

.PHONY: campaign
campaign: build ## the long fault campaign (50 leader kills, 1,000 virtual days, …)
	MUSTER_CAMPAIGN=1 $(GO) test -p 1 -timeout 3h -count 1 -v ./e2e/...

.PHONY: bench
bench: build ## the benchmarks that the claims stand on
	bin/muster bench all

.PHONY: generate
generate: ## write the generated code again
	$(TOOL) buf generate

.PHONY: lint
lint: ## formatting, vet, staticcheck, protos, generated code, house rules
	@test -z "$$(gofmt -l $$(git ls-files '*.go'))" || { echo "gofmt would change:"; gofmt -l $$(git ls-files '*.go'); exit 1; }
	$(GO) vet ./...
	$(TOOL) staticcheck ./...
	$(TOOL) buf lint
	$(TOOL) buf generate
	@git diff --exit-code -- proto || { echo "generated code differs: run make generate and commit"; exit 1; }
	@if base=$$(git rev-parse -q --verify refs/tags/proto-base 2>/dev/null || git rev-list -n 1 --skip 20 HEAD 2>/dev/null) && [ -n "$$base" ] && git cat-file -e $$base:proto 2>/dev/null; then $(TOOL) buf breaking --against ".git#ref=$$base"; fi

.PHONY: clean
clean: ## remove what was built
	rm -rf bin
