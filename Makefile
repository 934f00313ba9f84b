# Planaria: what a person runs. `make help` lists it.

GO      ?= go
TIMEOUT ?= 25m
# Binaries are static: they run on any Linux of this architecture. The OpenAI
# library, a quarter of all compiling, is left as it is: it waits for a network.
BUILD    = CGO_ENABLED=0 $(GO) build -trimpath -ldflags='-s -w' -gcflags='github.com/openai/openai-go/v3/...=-N -l'

# What sandboxes run; bin/planaria carries it. It names no commit, so that it is
# the same file as long as its sources are.
SANDBOX  = cmd/planaria/planaria-sandbox
PROGRESS = awk '/^[A-Za-z0-9_.\/~-]+$$/ { if (++n % 40 == 0) print "  " n " packages compiled"; fflush(); next } { print }'

# SQLite is C made into Go: under the race detector each of its loads and stores
# is a call, and the tests took more than twice their time. Ours stay watched.
RACE     = -race -gcflags=modernc.org/sqlite/lib=-race=false -gcflags=modernc.org/libc=-race=false

# A pipe fails when any part of it does.
SHELL       := /bin/bash
.SHELLFLAGS := -o pipefail -c

.DEFAULT_GOAL := help
.PHONY: help build demo test check bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

build: ## build bin/planaria
	@echo "building bin/planaria (the first time also its libraries, some minutes)"
	@$(BUILD) -buildvcs=false -v -o $(SANDBOX) ./cmd/planaria-sandbox 2>&1 | $(PROGRESS)
	@$(BUILD) -tags carries -v -o bin/planaria ./cmd/planaria 2>&1 | $(PROGRESS)

demo: build ## an agent at work, its server killed twice, nothing repeated
	@./bin/planaria demo

test: check build ## all checks, then all tests with the race detector
	@echo "== go test -race"
	@PLANARIA_TEST_BINARY=$(CURDIR)/bin/planaria PLANARIA_TEST_SANDBOX=$(CURDIR)/$(SANDBOX) CGO_ENABLED=1 $(GO) test $(RACE) -timeout $(TIMEOUT) ./...

check: ## gofmt, go vet, staticcheck
	@echo "== gofmt"
	@files=$$("$$($(GO) env GOROOT)/bin/gofmt" -l $$(find . -name '*.go' -not -path './.*' -not -path '*/node_modules/*')); \
		if [ -n "$$files" ]; then echo "not formatted, run gofmt -w:" $$files; exit 1; fi
	@echo "== go vet"
	@$(GO) vet ./...
	@echo "== staticcheck"
	@$(GO) tool staticcheck ./...

bench: ## measure against the targets, beside baselines of the same machine
	@$(GO) run ./bench

clean: ## remove what was built
	@rm -rf bin $(SANDBOX)
