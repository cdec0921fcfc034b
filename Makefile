# `make demo` and `make test` are the way in; `make help` lists the rest.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
COMMIT  ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# The commit's date, so that the same commit builds the same binary.
DATE    ?= $(shell git log -1 --format=%cI 2>/dev/null || echo unknown)

GO       ?= go
# The version comes in by LDFLAGS. Go's own stamp is an error where git does not
# trust the owner of the folder, as in a checkout that root did not make.
export GOFLAGS := -buildvcs=false $(GOFLAGS)
# All specs run on the first kernel; on the others those whose behaviour depends
# on the kernel (label "kernel").
OTHER_KERNELS := 6.12 7.3
KERNELS  := 6.1 $(OTHER_KERNELS)
KERNEL   ?= 6.1
LDFLAGS  := -s -w -buildid= -X main.version=$(VERSION) -X main.commit=$(COMMIT) -X main.date=$(DATE)
GOBUILD  := CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)'
BED      := build/bed
VM       := .cache/bin/vm
E2E       = $(VM) run -share $(BED) -e KERNELS="$(KERNELS)"
# A number of inputs: at the end of a time the fuzzer of Go before 1.27 fails now
# and then with "context deadline exceeded" (go.dev/issue/75804).
FUZZTIME ?= 20000x
# Of Debian, in the guest.
PODMAN   := podman buildah crun busybox-static

# What is released. In the image nothing is newer than the commit.
ARCHES   := amd64 arm64 ppc64le s390x
IMAGE    ?= rdma-cni:$(VERSION)
IMAGE_ARCHES ?= $(ARCHES)
SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)

# The version is in the file's name, so that a new one is built when it changes.
GOLANGCI_LINT_VERSION := v2.15.0
GOLANGCI_LINT := .cache/bin/golangci-lint-$(GOLANGCI_LINT_VERSION)

.PHONY: help build image image-context release bench test test-unit test-e2e test-kernels test-podman test-containerd test-softroce test-image test-release soak fuzz demo lint fmt bed chain clean FORCE

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "%-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

build: build/rdma build/rdma-cni ## the plugin and its companion, static binaries

build/rdma build/rdma-cni: build/%: FORCE
	$(GOBUILD) -o $@ ./cmd/$*

# The context of the image's build: the Dockerfile, and for each architecture a
# root file system.
image-context: $(ARCHES:%=build/image/linux/%)
	cp Dockerfile build/image/

$(ARCHES:%=build/image/linux/%): build/image/linux/%: FORCE
	rm -rf $@
	GOOS=linux GOARCH=$* $(GOBUILD) -o $@/usr/bin/ ./cmd/rdma ./cmd/rdma-cni
	deployment/build/image-root.sh $@ $(SOURCE_DATE_EPOCH)

image: image-context ## the image, with buildah, podman or docker (IMAGE=name IMAGE_ARCHES="amd64 arm64" ENGINE=podman)
	VERSION=$(VERSION) REVISION=$(COMMIT) SOURCE_DATE_EPOCH=$(SOURCE_DATE_EPOCH) ENGINE=$(ENGINE) \
		deployment/build/image.sh build/image $(IMAGE) $(IMAGE_ARCHES)

release: $(ARCHES:%=build/image/linux/%) ## archives for all architectures, bills of materials and checksums, in build/release
	deployment/build/release.sh build/release $(VERSION) $(SOURCE_DATE_EPOCH) $(ARCHES)

test: test-unit fuzz test-e2e test-kernels test-podman test-containerd test-softroce test-image test-release ## everything, on real kernels too

test-unit: ## tests that need neither root nor RDMA
	$(GO) vet ./...
	$(GO) test -race -count=1 ./cmd/... ./pkg/... ./test/vm/... ./test/manifests/... # the contract tests build the plugin, which go's cache does not see

# The specs labelled "alone" unfit the guest for others: they get one of their own.
test-e2e: bed ## the tests on a real kernel, in a virtual machine (KERNEL=6.1, KILL_EVERY=1 kills at all points with InfiniBand too)
	$(E2E) $(if $(KILL_EVERY),-e KILL_EVERY=$(KILL_EVERY)) -kernel $(KERNEL) -timeout 60m -- /bed/guest.sh -ginkgo.label-filter='!alone && !podman && !containerd && !softroce' $(ARGS)
	$(E2E) -kernel $(KERNEL) -timeout 5m -- /bed/guest.sh -ginkgo.label-filter='alone && !containerd' $(ARGS)

test-kernels: bed ## what differs from kernel to kernel, on the other ones
	@for kernel in $(OTHER_KERNELS); do \
		$(E2E) -kernel $$kernel -timeout 60m -- /bed/guest.sh -ginkgo.label-filter='kernel && !alone && !softroce' $(ARGS) || exit; \
	done

soak: bed ## ADD, CHECK and DEL with random faults in a virtual machine (N=2000 rounds, SEED=... repeats a run)
	$(E2E) -kernel $(KERNEL) -timeout 12h -e SOAK_ROUNDS=$(or $(N),2000) -e SOAK_SEED=$(SEED) -- /bed/guest.sh -ginkgo.label-filter=soak

# go test takes one target at a time. What a target finds it writes to
# testdata/fuzz, where it belongs into a commit.
fuzz: ## each fuzz target with FUZZTIME inputs
	@mkdir -p build
	@for target in $$(grep -rhoP '^func \KFuzz\w+' pkg cmd --include='*_test.go'); do \
		package=./$$(dirname $$(grep -rl "^func $$target(" pkg cmd)); \
		echo "$$package $$target"; \
		$(GO) test -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) $$package >build/fuzz.log 2>&1 || { cat build/fuzz.log; exit 1; }; \
	done

test-podman: bed ## the plugin under Debian's podman, in a virtual machine
	sh test/e2e/debian-root.sh $(CURDIR)/.cache podman $(PODMAN)
	cp .cache/podman/root.tar $(BED)/
	$(E2E) -kernel $(KERNEL) -timeout 5m -- sh -c 'tar -x -C / -f /bed/root.tar && exec /bed/guest.sh -ginkgo.label-filter="podman && !image" $(ARGS)'
	rm $(BED)/root.tar

test-image: bed image-context ## the image, built by Debian's podman and buildah and run, in a virtual machine
	sh test/e2e/debian-root.sh $(CURDIR)/.cache podman $(PODMAN)
	cp .cache/podman/root.tar $(BED)/
	rm -rf $(BED)/image && cp -a build/image $(BED)/image && cp deployment/build/image.sh $(BED)/image/
	$(E2E) -kernel $(KERNEL) -timeout 20m -- sh -c 'tar -x -C / -f /bed/root.tar && exec /bed/guest.sh -ginkgo.label-filter=image $(ARGS)'
	rm -r $(BED)/root.tar $(BED)/image

test-release: ## what make release makes, made twice
	$(GO) test -count=1 ./test/release

# Debian's containerd, and containerd 2 from source with Debian's runc. A reboot
# takes two guests: what the first leaves on disk goes over to the second.
test-containerd: bed ## the plugin under containerd 1.6 and 2, in virtual machines
	sh test/e2e/debian-root.sh $(CURDIR)/.cache containerd containerd runc
	mkdir -p $(BED)/containerd2
	cd test/containerd && CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(CURDIR)/$(BED)/containerd2/ tool
	cp .cache/containerd/root.tar test/e2e/containerd.sh $(BED)/
	for version in 1.6 2; do \
		for specs in 'containerd && !alone' before-reboot after-reboot; do \
			$(E2E) -kernel $(KERNEL) -timeout 20m -e CONTAINERD_VERSION=$$version -- /bed/containerd.sh -ginkgo.label-filter="$$specs" $(ARGS) || exit; \
		done; \
	done
	rm -r $(BED)/root.tar $(BED)/containerd2 $(BED)/reboot.tar

# Soft-RoCE devices can be moved from this kernel on.
SOFTROCE := 7.3

test-softroce: bed $(BED)/softroce.tar ## soft-RoCE with RDMA traffic between pods, on a stock kernel
	$(E2E) -kernel $(SOFTROCE) -timeout 30m -- sh -c 'tar -x -C / -f /bed/softroce.tar && exec /bed/guest.sh -ginkgo.label-filter=softroce $(ARGS)'

# Debian's programs for RDMA traffic.
$(BED)/softroce.tar: test/e2e/debian-root.sh | chain
	sh test/e2e/debian-root.sh $(CURDIR)/.cache softroce ibverbs-utils perftest
	cp .cache/softroce/root.tar $@

bench: chain ## measure the plugin in a virtual machine (N=50 rounds, BASE=rev compares with another commit, ICOUNT=1 counts instructions)
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(BED)/bin/ ./test/bench ./test/bench/empty
	$(if $(BASE),rm -rf .cache/base && git worktree prune && git worktree add --detach .cache/base $(BASE) && \
		(cd .cache/base && $(GOBUILD) -o $(CURDIR)/$(BED)/bin/rdma-base ./cmd/rdma); git worktree remove --force .cache/base)
	$(VM) run -kernel $(KERNEL) $(if $(ICOUNT),-icount) -timeout 30m -share $(BED) -- sh -c 'mkdir /tmp/bin && cp /bed/bin/* /tmp/bin && \
		exec /tmp/bin/bench -n $(or $(N),50) $(if $(BASE),-base /tmp/bin/rdma-base) $(if $(DEVICES),-devices $(DEVICES))'

# What the guest gets: plugin and companion, delegate and runtime, and the tests.
bed: chain
	CGO_ENABLED=0 $(GO) test -c -trimpath -ldflags '-s -w' -o $(BED)/bin/e2e.test ./test/e2e
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(BED)/bin/ \
		github.com/containernetworking/plugins/plugins/main/loopback \
		github.com/containernetworking/plugins/plugins/meta/sbr \
		github.com/containernetworking/plugins/plugins/meta/tuning
	cp test/e2e/guest.sh $(BED)/
	rm -rf $(BED)/examples && cp -r deployment/examples $(BED)/

chain: $(VM)
	@$(VM) prepare -kernel $(KERNEL)
	@mkdir -p $(BED)/bin
	@$(GOBUILD) -o $(BED)/bin/ ./cmd/rdma ./cmd/rdma-cni
	@CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-s -w' -o $(BED)/bin/ \
		github.com/containernetworking/cni/cnitool \
		github.com/containernetworking/plugins/plugins/main/host-device \
		github.com/containernetworking/plugins/plugins/main/macvlan \
		github.com/containernetworking/plugins/plugins/main/ptp \
		github.com/containernetworking/plugins/plugins/ipam/host-local \
		./test/e2e/ib-sriov

demo: chain $(BED)/softroce.tar ## attachments to look at, in virtual machines: a VF (KERNEL=6.1), and soft-RoCE with traffic
	@cp test/demo/*.sh $(BED)/
	@$(VM) run -kernel $(KERNEL) -timeout 1m -share $(BED) -- sh /bed/demo.sh
	@$(VM) run -kernel $(SOFTROCE) -timeout 3m -share $(BED) -- sh /bed/softroce.sh

$(VM): FORCE
	@$(GO) build -o $@ ./test/vm

lint: $(GOLANGCI_LINT) ## the rules of .golangci.yml; the first time it builds the linter, which takes minutes
	$(GOLANGCI_LINT) run

fmt: $(GOLANGCI_LINT) ## format the Go sources
	$(GOLANGCI_LINT) fmt

$(GOLANGCI_LINT):
	@echo "building golangci-lint $(GOLANGCI_LINT_VERSION)"
	@GOBIN=$(CURDIR)/.cache/bin GOFLAGS= $(GO) install github.com/golangci/golangci-lint/v2/cmd/golangci-lint@$(GOLANGCI_LINT_VERSION)
	@mv .cache/bin/golangci-lint $@

clean: ## remove build output and downloads
	rm -rf build .cache
