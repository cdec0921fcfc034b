package rdma

import (
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const (
	cmdResQPGet    = 10 // RDMA_NLDEV_CMD_RES_QP_GET
	attrResQP      = 19 // RDMA_NLDEV_ATTR_RES_QP
	attrResType    = 26 // RDMA_NLDEV_ATTR_RES_TYPE
	queuePairOfGSI = 1  // IB_QPT_GSI
)

// HasGSI tells whether a device of the Conn's namespace has the kernel's queue
// pair for general services (QP 1), on which connections are managed: without
// it there is no rdma_cm. The kernel tells of its own queue pairs only those who
// are in the initial PID namespace; to others a device seems to have none.
func (c *Conn) HasGSI(index uint32) (bool, error) {
	replies, err := c.request(fmt.Sprintf("list the queue pairs of RDMA device %d", index), cmdResQPGet, unix.NLM_F_DUMP,
		[]*nl.RtAttr{uint32Attr(nl.RDMA_NLDEV_ATTR_DEV_INDEX, index)})
	if err != nil {
		return false, err
	}
	for _, attrs := range replies {
		if found, err := listsGSI(attrs[attrResQP]); found || err != nil {
			return found, err
		}
	}
	return false, nil
}

func listsGSI(queuePairs []byte) (found bool, err error) {
	err = eachAttribute(queuePairs, func(_ uint16, entry []byte) error {
		fields, err := parseAttributes(entry)
		if err != nil {
			return err
		}
		kind, ok := fields.uint8(attrResType)
		found = found || ok && kind == queuePairOfGSI
		return nil
	})
	return found, err
}

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
