#!/bin/sh
# Runs the test binary in the guest: from its tmpfs, since each page that is
# executed from the shared folder crosses the 9p link.
set -e
mkdir -p /tmp/bin
cp /bed/bin/* /tmp/bin/
exec /tmp/bin/e2e.test -test.timeout=0 -ginkgo.no-color "$@"
