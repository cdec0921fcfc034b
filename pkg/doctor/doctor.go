// Package doctor examines a node, or one pod, for what keeps RDMA from working
// there. Checks are pure functions over gathered facts: Gather and GatherPod
// look, Examine and ExaminePod judge.
package doctor

// Severity is how bad a finding is.
type Severity string

// The severities.
const (
	Pass Severity = "PASS"
	Warn Severity = "WARN" // it can work, or works with a limit
	Fail Severity = "FAIL" // attachments fail, or RDMA in pods does
)

// Finding is what a check found. Its fields are a stable schema.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity"`
	// Device is what was checked: an RDMA device, a function, a file; "" is
	// the node or pod as a whole.
	Device  string `json:"device,omitempty"`
	Message string `json:"message"`
	Meaning string `json:"meaning,omitempty"` // of a WARN or FAIL
	Fix     string `json:"fix,omitempty"`     // what to do about it
}

// check is one question about the facts F. It always finds something, if only
// that all is well or that there is nothing to look at.
type check[F any] struct {
	name string
	find func(F) []Finding
}

func examine[F any](facts F, checks []check[F]) []Finding {
	findings := []Finding{}
	for _, c := range checks {
		for _, f := range c.find(facts) {
			f.Check = c.name
			findings = append(findings, f)
		}
	}
	return findings
}

func pass(device, message string) Finding {
	return Finding{Severity: Pass, Device: device, Message: message}
}

func warn(device, message, meaning, fix string) Finding {
	return Finding{Severity: Warn, Device: device, Message: message, Meaning: meaning, Fix: fix}
}

func fail(device, message, meaning, fix string) Finding {
	return Finding{Severity: Fail, Device: device, Message: message, Meaning: meaning, Fix: fix}
}

// orPass adds the finding that all is well if there is no other.
func orPass(findings []Finding, message string) []Finding {
	if len(findings) == 0 {
		return []Finding{pass("", message)}
	}
	return findings
}
