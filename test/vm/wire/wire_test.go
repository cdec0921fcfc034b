package wire

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	var b bytes.Buffer
	for _, payload := range []string{"", "output\n"} {
		if err := Write(&b, Stdout, []byte(payload)); err != nil {
			t.Fatal(err)
		}
		kind, got, err := Read(&b)
		if err != nil || kind != Stdout || string(got) != payload {
			t.Errorf("got %q %q %v, want %q", kind, got, err, payload)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	if _, _, err := Read(bytes.NewReader([]byte{Stdout, 5, 0, 0, 0, 'x'})); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut short: %v", err)
	}
	if _, _, err := Read(bytes.NewReader([]byte{Stdout, 0xff, 0xff, 0xff, 0xff})); err == nil {
		t.Error("4 GiB frame accepted")
	}
}
