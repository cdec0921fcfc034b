package rdma

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
)

// Resources counts the objects that a device of the Conn's namespace holds for
// its users, by the kernel's names for them: ctx (user contexts), cm_id, qp,
// cq, mr, pd, srq. The kernel's own are counted too: one qp, cq and pd for each
// port that has management datagrams.
func (c *Conn) Resources(index uint32) (map[string]uint64, error) {
	attrs, err := c.get(fmt.Sprintf("count the resources of RDMA device %d", index), nl.RDMA_NLDEV_CMD_RES_GET,
		uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index))
	if err != nil {
		return nil, err
	}
	return resourceCounts(attrs[nl.RDMA_NLDEV_ATTR_RES_SUMMARY])
}

func resourceCounts(summary []byte) (map[string]uint64, error) {
	counts := map[string]uint64{}
	err := eachAttribute(summary, func(_ uint16, entry []byte) error {
		fields, err := parseAttributes(entry)
		if err != nil {
			return err
		}
		n, _ := fields.uint64(nl.RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_CURR)
		counts[fields.text(nl.RDMA_NLDEV_ATTR_RES_SUMMARY_ENTRY_NAME)] = n
		return nil
	})
	return counts, err
}
