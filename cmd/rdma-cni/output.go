package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"sigs.k8s.io/yaml"
)

// Output formats.
const (
	formatTable = "table"
	formatJSON  = "json"
	formatYAML  = "yaml"
)

// print writes data in the format asked for; table writes it for people.
func (a *app) print(data any, table func(w io.Writer)) error {
	switch a.format {
	case formatJSON:
		out, err := json.MarshalIndent(data, "", "  ")
		if err != nil {
			return fmt.Errorf("encode the output: %w", err)
		}
		return a.write(append(out, '\n'))
	case formatYAML:
		out, err := yaml.Marshal(data)
		if err != nil {
			return fmt.Errorf("encode the output: %w", err)
		}
		return a.write(out)
	default:
		var text strings.Builder
		table(&text)
		return a.write([]byte(text.String()))
	}
}

func (a *app) write(out []byte) error {
	if _, err := a.Out.Write(out); err != nil {
		return fmt.Errorf("write the output: %w", err)
	}
	return nil
}

// table writes rows in columns. Empty cells show as "-".
func table(w io.Writer, header []string, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, strings.Join(header, "\t"))
	for _, row := range rows {
		for i, cell := range row {
			if cell == "" {
				row[i] = "-"
			}
		}
		_, _ = fmt.Fprintln(t, strings.Join(row, "\t"))
	}
	_ = t.Flush()
}

// Colours of a terminal.
const (
	red    = "31"
	green  = "32"
	yellow = "33"
)

func (a *app) colour(code, text string) string {
	if !a.Terminal {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}
