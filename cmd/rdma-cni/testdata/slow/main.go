// Command slow is a CNI plugin that answers VERSION as soon as the file go-on
// is beside it.
package main

import (
	"fmt"
	"os"
	"path/filepath"
	"time"
)

func main() {
	for {
		if _, err := os.Stat(filepath.Join(filepath.Dir(os.Args[0]), "go-on")); err == nil {
			fmt.Println(`{"cniVersion": "1.0.0", "supportedVersions": ["1.0.0"]}`)
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}
